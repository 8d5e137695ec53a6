"""One pod that prefills and decodes: decode steps and prefills share the engine under one scheduler.

The engine's KV blocks are split in halves: the scheduler's pool has the first, the decoder's the second. A finished prompt's
blocks are copied from one to the other, and the scheduler's copy stays in its prefix cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from flowprefill.engines.protocol import Engine, SamplingParams
from flowprefill.errors import InvalidRequest
from flowprefill.execution.colocated import ColocatedDecode
from flowprefill.execution.listener import DriverListener
from flowprefill.execution.pool import Items
from flowprefill.execution.results import Finished, FinishedPrefill
from flowprefill.openai.requests import MAX_CHOICES, Endpoint, GenerationRequest
from flowprefill.openai.responses import ResponseShape
from flowprefill.scheduling.actions import Action, Outcome, Task
from flowprefill.scheduling.events import Event
from flowprefill.scheduling.kv import KVCachePool
from flowprefill.scheduling.predictor import Predictor
from flowprefill.scheduling.snapshot import SchedulerSnapshot
from flowprefill.server.answering import Reply
from flowprefill.server.choices import sampling_of
from flowprefill.server.client import unless_client_leaves
from flowprefill.server.decode_role import answer_plan, decode_queue_limit, report_decoder, respond
from flowprefill.server.decoding import Answer, DecodeBridge
from flowprefill.server.kv_transfer import in_thread
from flowprefill.server.prefill import PrefillService
from flowprefill.server.role import Pod
from flowprefill.server.scheduled import ScheduledPrefill
from flowprefill.server.slo import Slo, slo_of
from flowprefill.server.states import prefill_state
from flowprefill.wire import PodState
from flowprefill_crd import LiveConfig


class ColocatedRole:
    """Takes plain OpenAI requests."""

    def __init__(self, pod: Pod, predictor: Predictor) -> None:
        self._pod = pod
        spec = pod.engine.spec
        num_prefill = spec.num_kv_blocks // 2
        self._bridge = DecodeBridge(pod.states.changed)
        self._scheduled = ScheduledPrefill(
            pod,
            predictor,
            num_kv_blocks=num_prefill,
            payload=self._payload,
            listener=lambda service: _Switch(service, self._decoder_of),
        )
        self._decoder = ColocatedDecode(
            KVCachePool(spec.num_kv_blocks - num_prefill, spec.block_size),
            self._bridge,
            self._scheduled.clock,
            max_batch_size=pod.config.decode.max_batch_size,
            queue_limit=decode_queue_limit(pod.config),
            block_offset=num_prefill,
        )
        self._decoder.connect(self._scheduled.driver)
        self._bridge.connect(self._decoder)

    @property
    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            *self._pod.model_routes(),
        ]

    def state(self, sequence: int) -> PodState:
        state = prefill_state(self._pod, self._scheduled.service.view, sequence)
        decoder = self._decoder.state()
        return state.model_copy(update={"kv_blocks_free": state.kv_blocks_free + decoder.kv_blocks_free})

    def history(self) -> dict[str, object]:
        return self._scheduled.history.as_json()

    def reconfigure(self, live: LiveConfig) -> None:
        self._scheduled.reconfigure(live)

    def before_scrape(self) -> None:
        self._scheduled.before_scrape()
        report_decoder(self._pod.metrics, self._decoder.state())
        decoder, snapshot = self._decoder.state(), self._scheduled.driver.snapshot()
        self._pod.metrics.scheduler.kv(
            num_blocks=snapshot.kv_blocks + decoder.kv_blocks,
            num_free=snapshot.kv_blocks_free + decoder.kv_blocks_free,
        )

    def failure(self) -> str | None:
        return None  # a crash of the scheduler's thread is told to the lifecycle

    async def start(self) -> None:
        self._scheduled.driver.start()

    async def drained(self) -> None:
        return

    async def close(self) -> None:
        self._decoder.close()
        await self._bridge.close()
        await asyncio.to_thread(self._scheduled.driver.close)

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, "completions")

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, "chat")

    async def _answer(self, request: Request, endpoint: Endpoint) -> Response:
        asked = (await self._pod.parsed(request, endpoint)).request
        if asked.kv_transfer_params:
            raise InvalidRequest(
                "this pod prefills and decodes by itself: kv_transfer_params are not accepted here",
                param="kv_transfer_params",
            )
        reply = await unless_client_leaves(request.receive, self._reply(asked))
        return await respond(request, asked, reply)

    async def _reply(self, asked: GenerationRequest) -> Reply:
        prompts = await self._pod.texts.prompts(asked)
        if len(prompts) * asked.n > MAX_CHOICES:
            raise InvalidRequest(
                f"{len(prompts)} prompts times n = {asked.n} are {len(prompts) * asked.n} choices; accepted are "
                f"at most {MAX_CHOICES} in one request",
                param="n",
            )
        limits = [self._pod.texts.room(asked, len(ids), asked.token_limit) for ids in prompts]
        slo = slo_of(asked.vllm_xargs, self._pod.live.current)
        answers: list[Answer] = []
        reply = Reply(
            asked,
            ResponseShape.new(asked.endpoint, asked.model, include_usage=asked.include_usage),
            answers,
            num_prompt_tokens=sum(len(ids) for ids in prompts),
            num_cached_tokens=0,
            on_tokens=self._pod.metrics.pod.generated,
        )
        for number, (token_ids, max_tokens) in enumerate(zip(prompts, limits, strict=True)):
            answers.append(
                self._one(asked, token_ids, slo, reply, max_tokens=max_tokens, first_index=number * asked.n)
            )
        return reply

    def _one(
        self,
        asked: GenerationRequest,
        token_ids: Sequence[int],
        slo: Slo,
        reply: Reply,
        *,
        max_tokens: int,
        first_index: int,
    ) -> Answer:
        """The answer to one prompt: prefilled when it is read, then decoded."""
        prompt = _Prompt(
            self._pod.engine,
            self._scheduled.service,
            token_ids,
            slo,
            sampling_of(asked),
            reply,
            num_fills=asked.n,
        )
        plan = answer_plan(
            asked,
            token_ids,
            self._pod.engine.spec,
            max_tokens=max_tokens,
            tbt_slo_s=slo.tbt_s,
            first_index=first_index,
        )
        return Answer(
            plan,
            self._bridge,
            prompt.fill,
            lambda: self._pod.texts.stream(token_ids),
            before=prompt.compute,
            on_close=prompt.end,
        )

    def _payload(self, task: Task) -> Items:
        return self._decoder.payload(task) if task.kind == "decode" else self._scheduled.service.payload(task)

    def _decoder_of(self) -> ColocatedDecode:
        return self._decoder


class _Prompt:
    """One prompt in a colocated pod: computed once, copied into each choice's blocks, then released."""

    def __init__(
        self,
        engine: Engine,
        service: PrefillService,
        token_ids: Sequence[int],
        slo: Slo,
        sampling: SamplingParams,
        reply: Reply,
        *,
        num_fills: int,
    ) -> None:
        self._engine = engine
        self._service = service
        self._token_ids = token_ids
        self._slo = slo
        self._sampling = sampling
        self._reply = reply
        self._fills_left = num_fills
        self._finished: FinishedPrefill | None = None
        self._readers = 0
        self._ended = False

    async def compute(self) -> int | None:
        """Prefill the prompt; the answer's first token."""
        self._finished = await self._service.prefill(self._token_ids, self._slo, self._sampling)
        self._reply.num_cached_tokens += self._finished.num_cached_tokens
        return self._finished.token_id

    async def fill(self, block_ids: Sequence[int], num_cached_tokens: int) -> None:
        """Copy the blocks that the decoder's pool does not hold yet."""
        finished = self._finished
        assert finished is not None, "a prompt is computed before it is decoded"
        size = self._engine.spec.block_size
        skip, end = num_cached_tokens // size, -(-finished.num_tokens // size)
        source, target = finished.block_ids[skip:end], block_ids[skip:end]
        self._readers += 1
        try:
            await in_thread(partial(_copy, self._engine, source, target))
        finally:
            self._readers -= 1
            self._fills_left -= 1
            if not self._fills_left:
                self._ended = True
            self._release_if_over()

    def end(self) -> None:
        """Nobody reads the answer any more."""
        self._ended = True
        self._release_if_over()

    def _release_if_over(self) -> None:
        if self._ended and not self._readers and self._finished is not None:
            self._service.release(self._finished.request_id)
            self._finished = None


def _copy(engine: Engine, source: Sequence[int], target: Sequence[int]) -> None:
    engine.write_blocks(target, engine.read_blocks(source))


class _Switch(DriverListener):
    """Gives outcomes of decode steps to the decoder and everything else to the prefill service."""

    def __init__(self, service: PrefillService, decoder: Callable[[], ColocatedDecode]) -> None:
        self._service = service
        self._decoder = decoder

    def on_finish(self, request_id: str, outcome: Outcome, reason: str, result: Finished | None) -> None:
        if not self._decoder().on_finish(request_id, outcome, reason, result):
            self._service.on_finish(request_id, outcome, reason, result)

    def on_events(self, event: Event, actions: Sequence[Action], now_s: float) -> None:
        self._service.on_events(event, actions, now_s)

    def on_state(self, snapshot: SchedulerSnapshot) -> None:
        self._service.on_state(snapshot)

    def on_crash(self, error: BaseException) -> None:
        self._service.on_crash(error)  # first: closing waits for a thread, and the pod is broken now
        self._decoder().close()
