"""The prefill server: vLLM's prefill leg over HTTP, KV blocks over a socket."""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from flowprefill.errors import InvalidRequest
from flowprefill.execution.results import FinishedPrefill
from flowprefill.hosting.listening import port_of
from flowprefill.openai.requests import CompletionRequest, Endpoint, GenerationRequest
from flowprefill.openai.responses import Choice, ResponseShape, Usage
from flowprefill.scheduling.predictor import Predictor
from flowprefill.server.choices import sampling_of
from flowprefill.server.client import unless_client_leaves
from flowprefill.server.holds import EndReason, HoldTable
from flowprefill.server.kv_producer import KVServer
from flowprefill.server.kv_transfer import TransferLimits
from flowprefill.server.role import Pod
from flowprefill.server.scheduled import ScheduledPrefill
from flowprefill.server.slo import decode_max_tokens, slo_of
from flowprefill.server.states import prefill_state
from flowprefill.wire import KV_RELEASE_PATH, KVTransferParams, PodState
from flowprefill_crd import LiveConfig

log = logging.getLogger(__name__)


class PrefillRole:
    """Takes prefill legs, answers one token and where the KV waits, and lets decode pods pull it."""

    def __init__(
        self, pod: Pod, predictor: Predictor, *, kv_socket: socket.socket, advertise_host: str
    ) -> None:
        self._pod = pod
        self._kv_socket, self._advertise_host = kv_socket, advertise_host
        self._engine_id = uuid.uuid4().hex
        self._scheduled = ScheduledPrefill(pod, predictor, num_kv_blocks=pod.engine.spec.num_kv_blocks)
        self._service = self._scheduled.service
        self._holds = HoldTable(self._hold_ended, lease_s=float(pod.config.kv_transfer.lease_seconds))
        timeout_s = float(pod.config.kv_transfer.timeout_seconds)
        self._kv_server = KVServer(
            pod.engine,
            self._holds,
            pod.metrics.kv_transfer,
            limits=TransferLimits(stall_s=timeout_s, pull_s=timeout_s),
        )

    @property
    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route(KV_RELEASE_PATH, self._release, methods=["DELETE"]),
            *self._pod.model_routes(),
        ]

    def state(self, sequence: int) -> PodState:
        return prefill_state(self._pod, self._service.view, sequence)

    def history(self) -> dict[str, object]:
        return self._scheduled.history.as_json()

    def reconfigure(self, live: LiveConfig) -> None:
        self._scheduled.reconfigure(live)

    def before_scrape(self) -> None:
        self._pod.metrics.kv_transfer.held(len(self._holds))
        self._scheduled.before_scrape()

    def failure(self) -> str | None:
        return None  # a crash of the scheduler's thread is told to the lifecycle

    async def start(self) -> None:
        self._scheduled.driver.start()
        await self._kv_server.start(self._kv_socket)
        log.info("KV port open", extra={"host": self._advertise_host, "port": port_of(self._kv_socket)})

    async def drained(self) -> None:
        await self._holds.wait_empty()

    async def close(self) -> None:
        await self._kv_server.close()
        await asyncio.to_thread(self._scheduled.driver.close)

    async def _completions(self, request: Request) -> Response:
        return await self._leg(request, "completions")

    async def _chat(self, request: Request) -> Response:
        return await self._leg(request, "chat")

    async def _release(self, request: Request) -> Response:
        self._holds.end(request.path_params["remote_request_id"], "aborted")
        return Response(status_code=204)

    async def _leg(self, request: Request, endpoint: Endpoint) -> Response:
        parsed = await self._pod.parsed(request, endpoint)
        leg = parsed.request
        _check_leg(leg)
        work = self._prefill(leg, request.state.request_id)
        finished, body = await unless_client_leaves(request.receive, work)
        if await request.is_disconnected():
            self._holds.end(finished.request_id, "aborted")
        return JSONResponse(body)

    async def _prefill(
        self, leg: GenerationRequest, request_id: str
    ) -> tuple[FinishedPrefill, dict[str, object]]:
        prompts = await self._pod.texts.prompts(leg)
        (token_ids,) = prompts
        self._pod.texts.room(leg, len(token_ids), decode_max_tokens(leg.vllm_xargs))
        slo = slo_of(leg.vllm_xargs, self._pod.live.current)
        finished = await self._service.prefill(token_ids, slo, sampling_of(leg))
        self._holds.add(finished.request_id, finished.block_ids)
        log.debug(
            "prefill held",
            extra={
                "request_id": request_id,
                "kv_request_id": finished.request_id,
                "num_tokens": finished.num_tokens,
                "num_cached_tokens": finished.num_cached_tokens,
                "slo_class": slo.slo_class,
            },
        )
        return finished, self._answer(leg, token_ids, finished)

    def _answer(
        self, leg: GenerationRequest, token_ids: Sequence[int], finished: FinishedPrefill
    ) -> dict[str, object]:
        texts = self._pod.texts.stream(token_ids)
        text = "" if finished.token_id is None else texts.feed(finished.token_id) + texts.flush()
        shape = ResponseShape.new(leg.endpoint, leg.model)
        usage = Usage(
            prompt_tokens=len(token_ids), completion_tokens=1, cached_tokens=finished.num_cached_tokens
        )
        params = self._params(finished, may_sample=leg.min_tokens == 0).model_dump(mode="json")
        return shape.whole(
            [Choice(index=0, text=text, finish_reason="length")], usage, kv_transfer_params=params
        )

    def _params(self, finished: FinishedPrefill, *, may_sample: bool) -> KVTransferParams:
        spec = self._pod.engine.spec
        return KVTransferParams(
            remote_engine_id=self._engine_id,
            remote_host=self._advertise_host,
            remote_port=port_of(self._kv_socket),
            remote_request_id=finished.request_id,
            remote_block_ids=finished.block_ids[: -(-finished.num_tokens // spec.block_size)],
            num_tokens=finished.num_tokens,
            block_size=spec.block_size,
            dtype=spec.dtype,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            model=spec.model,
            revision=spec.revision,
            num_cached_tokens=finished.num_cached_tokens,
            first_token_id=finished.token_id if may_sample else None,
        )

    def _hold_ended(self, request_id: str, reason: EndReason) -> None:
        self._pod.metrics.kv_transfer.hold_ended(reason)
        self._service.release(request_id)


def _check_leg(leg: GenerationRequest) -> None:
    """Refuse what is not a prefill leg of one prompt."""
    params = leg.kv_transfer_params
    if params is None or params.get("do_remote_decode") is not True:
        raise InvalidRequest(
            "this pod only prefills: kv_transfer_params.do_remote_decode must be true; send requests to the proxy",
            param="kv_transfer_params",
        )
    if leg.stream or leg.token_limit != 1 or leg.n != 1:
        raise InvalidRequest(
            f"a prefill leg has stream: false, max_tokens: 1 and n: 1; got stream: {leg.stream}, "
            f"max_tokens: {leg.token_limit}, n: {leg.n}",
            param="max_tokens",
        )
    refuse_several_prompts(leg)


def refuse_several_prompts(leg: GenerationRequest) -> None:
    """One prompt per leg: `kv_transfer_params` name one request's KV."""
    num_prompts = len(leg.prompt) if isinstance(leg, CompletionRequest) else 1
    if num_prompts != 1:
        raise InvalidRequest(
            f"{num_prompts} prompts came; between prefill and decode pods a request has 1 (the proxy splits them)",
            param="prompt",
        )
