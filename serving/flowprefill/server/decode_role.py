"""The decode server: pulls a prompt's KV and generates, many answers in one batch."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from flowprefill.clock import MonotonicClock
from flowprefill.engines.protocol import EngineSpec
from flowprefill.errors import InvalidRequest, KVTransferFailed
from flowprefill.execution.decode import DecodeState
from flowprefill.execution.decode_loop import DecodeLoop
from flowprefill.metrics.engine import EngineMetrics
from flowprefill.openai.requests import Endpoint, GenerationRequest
from flowprefill.openai.responses import ResponseShape
from flowprefill.scheduling.kv import KVCachePool, prefix_hashes
from flowprefill.server.answering import Reply
from flowprefill.server.choices import AnswerPlan, sampling_of
from flowprefill.server.client import event_stream, unless_client_leaves
from flowprefill.server.decoding import Answer, DecodeBridge
from flowprefill.server.kv_consumer import KVClient
from flowprefill.server.kv_transfer import TransferLimits
from flowprefill.server.prefill_role import refuse_several_prompts
from flowprefill.server.role import Pod
from flowprefill.server.slo import slo_of
from flowprefill.server.states import decode_state
from flowprefill.wire import KVTransferParams, PodState
from flowprefill_crd import LiveConfig, PodConfig

log = logging.getLogger(__name__)


class DecodeRole:
    """Takes decode legs: the client's request with the prefill leg's `kv_transfer_params`."""

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self._bridge = DecodeBridge(pod.states.changed)
        spec = pod.engine.spec
        self._decoder = DecodeLoop(
            pod.engine,
            KVCachePool(spec.num_kv_blocks, spec.block_size),
            self._bridge,
            MonotonicClock(),
            max_batch_size=pod.config.decode.max_batch_size,
            queue_limit=decode_queue_limit(pod.config),
        )
        self._bridge.connect(self._decoder)
        transfer = pod.config.kv_transfer
        timeout_s = float(transfer.timeout_seconds)
        self._client = KVClient(
            pod.engine,
            pod.metrics.kv_transfer,
            limits=TransferLimits(stall_s=timeout_s, pull_s=timeout_s, max_retries=transfer.max_retries),
        )
        self._pulls: set[asyncio.Task[bool]] = set()

    @property
    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            *self._pod.model_routes(),
        ]

    def state(self, sequence: int) -> PodState:
        return decode_state(self._pod, self._decoder.state(), sequence)

    def reconfigure(self, live: LiveConfig) -> None:
        return

    def before_scrape(self) -> None:
        state = self._decoder.state()
        report_decoder(self._pod.metrics, state)
        self._pod.metrics.scheduler.kv(num_blocks=state.kv_blocks, num_free=state.kv_blocks_free)

    def failure(self) -> str | None:
        crash = self._decoder.crashed
        return None if crash is None else f"the decode thread crashed: {type(crash).__name__}: {crash}"

    def history(self) -> dict[str, object]:
        return {}

    async def start(self) -> None:
        self._decoder.start()

    async def drained(self) -> None:
        return

    async def close(self) -> None:
        await asyncio.to_thread(self._decoder.close)
        await self._bridge.close()
        await asyncio.gather(*self._pulls, return_exceptions=True)

    async def _completions(self, request: Request) -> Response:
        return await self._leg(request, "completions")

    async def _chat(self, request: Request) -> Response:
        return await self._leg(request, "chat")

    async def _leg(self, request: Request, endpoint: Endpoint) -> Response:
        parsed = await self._pod.parsed(request, endpoint)
        leg = parsed.request
        params = _params(leg)
        pull = KVPull(self._client, params, num_fills=leg.n, track=self._track)
        try:
            refuse_several_prompts(leg)
            prompts = await unless_client_leaves(request.receive, self._pod.texts.prompts(leg))
            reply = self._reply(leg, prompts[0], params, pull)
            return await respond(request, leg, reply)
        except BaseException:
            pull.end(pulled=False)
            raise

    def _reply(
        self, leg: GenerationRequest, token_ids: Sequence[int], params: KVTransferParams, pull: KVPull
    ) -> Reply:
        max_tokens = self._pod.texts.room(leg, len(token_ids), leg.token_limit)
        self._client.check(params)
        if params.num_tokens != len(token_ids):
            raise KVTransferFailed(
                f"the prefill pod computed {params.num_tokens} tokens, but the prompt has {len(token_ids)} here; "
                f"model {self._pod.engine.spec.model!r} must be the same on both sides"
            )
        slo = slo_of(leg.vllm_xargs, self._pod.live.current)
        plan = answer_plan(
            leg,
            token_ids,
            self._pod.engine.spec,
            max_tokens=max_tokens,
            tbt_slo_s=slo.tbt_s,
            first_token_id=_first_token(params, self._pod.engine.spec),
        )
        answer = Answer(
            plan,
            self._bridge,
            pull.fill,
            lambda: self._pod.texts.stream(token_ids),
            on_close=lambda: pull.end(pulled=False),
        )
        shape = ResponseShape.new(leg.endpoint, leg.model, include_usage=leg.include_usage)
        return Reply(
            leg,
            shape,
            [answer],
            num_prompt_tokens=len(token_ids),
            num_cached_tokens=params.num_cached_tokens,
            on_tokens=self._pod.metrics.pod.generated,
        )

    def _track(self, task: asyncio.Task[bool]) -> None:
        self._pulls.add(task)
        task.add_done_callback(self._pulls.discard)


class KVPull:
    """One request's KV on its way here: pulled once per choice, where blocks are missing, then given back."""

    def __init__(
        self,
        client: KVClient,
        params: KVTransferParams,
        *,
        num_fills: int,
        track: Callable[[asyncio.Task[bool]], None],
    ) -> None:
        self._client = client
        self._params = params
        self._fills_left = num_fills
        self._track = track
        self._ended = False

    async def fill(self, block_ids: Sequence[int], num_cached_tokens: int) -> None:
        """Bring the blocks that the pool does not hold yet."""
        skip = num_cached_tokens // self._params.block_size
        local = block_ids[skip : len(self._params.remote_block_ids)]
        await self._client.pull(self._params, skip_blocks=skip, local_block_ids=local)
        self._fills_left -= 1
        if not self._fills_left:
            self.end(pulled=True)

    def end(self, *, pulled: bool) -> None:
        """Tell the producer that its blocks may go. The first word counts."""
        if self._ended:
            return
        self._ended = True
        self._track(asyncio.ensure_future(self._client.release(self._params, pulled=pulled)))


def decode_queue_limit(config: PodConfig) -> int:
    """Answers that may wait for KV blocks: a few batches, beyond which a lease would end before their turn."""
    return 8 * config.decode.max_batch_size


def report_decoder(metrics: EngineMetrics, state: DecodeState) -> None:
    """Set the decoder's gauges."""
    metrics.decode.state(
        queued=state.queued, filling=state.filling, active=state.active, num_steps=state.num_steps
    )


def answer_plan(
    request: GenerationRequest,
    token_ids: Sequence[int],
    spec: EngineSpec,
    *,
    max_tokens: int,
    tbt_slo_s: float,
    first_index: int = 0,
    first_token_id: int | None = None,
) -> AnswerPlan:
    """What to generate for one prompt of a request."""
    stop_token_ids = set(request.stop_token_ids)
    if not request.ignore_eos:
        stop_token_ids.update(spec.eos_token_ids)
    return AnswerPlan(
        answer_id=uuid.uuid4().hex,
        num_prompt_tokens=len(token_ids),
        last_token_id=token_ids[-1],
        first_token_id=first_token_id,
        prefix_hashes=prefix_hashes(token_ids, spec.block_size),
        n=request.n,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        sampling=sampling_of(request),
        stop_token_ids=frozenset(stop_token_ids),
        stops=tuple(request.stop),
        tbt_slo_s=tbt_slo_s,
        first_index=first_index,
    )


async def respond(request: Request, asked: GenerationRequest, reply: Reply) -> Response:
    """The reply as the client asked for it: a stream that has begun, or the whole answer."""
    if asked.stream:
        return await unless_client_leaves(request.receive, event_stream(reply.events()))
    return JSONResponse(await unless_client_leaves(request.receive, reply.whole()))


def _first_token(params: KVTransferParams, spec: EngineSpec) -> int | None:
    """The first token that came with the KV. Raises `KVTransferFailed` when this model has no such token."""
    token_id = params.first_token_id
    if token_id is not None and not 0 <= token_id < spec.vocab_size:
        raise KVTransferFailed(
            f"kv_transfer_params.first_token_id is {token_id}; accepted are 0 to {spec.vocab_size - 1}"
        )
    return token_id


def _params(leg: GenerationRequest) -> KVTransferParams:
    given = leg.kv_transfer_params
    if given is None or given.get("do_remote_prefill") is not True:
        raise InvalidRequest(
            "this pod only decodes: kv_transfer_params of a finished prefill must come with the request "
            "(do_remote_prefill: true); send requests to the proxy",
            param="kv_transfer_params",
        )
    try:
        return KVTransferParams.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidRequest(
            f"kv_transfer_params.{'.'.join(map(str, first['loc']))} is not valid: {first['msg']}; the prefill pod "
            "must run the same engine",
            param="kv_transfer_params",
        ) from None
