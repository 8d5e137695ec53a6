"""One prompt's way through the pods: wait for a place, prefill leg, decode leg.

Retries. A first leg (prefill, or the only one in colocated mode) that dies before its answer is tried once more on
another pod with what is left of the budget. A decode leg is tried once more as long as none of its bytes have left:
with the same KV when the pod certainly never started on it, otherwise after a fresh prefill, because KV that was
pulled is gone from the prefill pod. A 4xx is never tried again.

Leaving. Whoever stops iterating, for whatever reason, closes the leg that is open, and KV that waits at a prefill
pod is given back.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from flowprefill.clock import Clock
from flowprefill.metrics.proxy import RouterMetrics
from flowprefill.openai.requests import Endpoint as ApiEndpoint
from flowprefill.openai.sse import DONE_DATA
from flowprefill.proxy import legs
from flowprefill.proxy.budget import FollowUp, remaining_budget_s
from flowprefill.proxy.dispatcher import Dispatcher, Placement
from flowprefill.proxy.pods import PodTable
from flowprefill.proxy.revisions import COLOCATED
from flowprefill.proxy.slo import Slo
from flowprefill.proxy.upstream import KVReleases, LegFailed, open_leg, read_events, read_json
from flowprefill.request import Request
from flowprefill.wire import Endpoint

log = logging.getLogger(__name__)

Stage = Literal["queue", "prefill", "kv_transfer", "first_decode", "answer", "done"]
PATHS: dict[ApiEndpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One prompt of a client's request, as it goes to pods. `request` is its place in the queue."""

    request_id: str
    api: ApiEndpoint
    body: Mapping[str, Any]  # Any: the client's JSON
    headers: tuple[tuple[str, str], ...]
    slo: Slo
    arrival_s: float
    request: Request
    num_choices: int = 1
    measured: Callable[[int], None] = lambda num_prompt_tokens: None


@dataclass(slots=True, kw_only=True)
class Timing:
    """When what happened to one prompt, on the proxy's clock. None: not (yet)."""

    arrival_s: float
    dispatched_s: float | None = None
    prefilled_s: float | None = None
    decoding_s: float | None = None
    first_token_s: float | None = None

    def parts_s(self) -> dict[str, float]:
        """TTFT taken apart into queue, prefill, kv_transfer and first_decode; the parts sum to it."""
        assert self.first_token_s is not None, "a first token has left"
        assert self.dispatched_s is not None
        parts = {"queue": self.dispatched_s - self.arrival_s}
        if self.prefilled_s is None or self.decoding_s is None:
            return {**parts, "prefill": self.first_token_s - self.dispatched_s}
        return {
            **parts,
            "prefill": self.prefilled_s - self.dispatched_s,
            "kv_transfer": self.decoding_s - self.prefilled_s,
            "first_decode": self.first_token_s - self.decoding_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What an exchange works with; the same for all of them."""

    clock: Clock
    http: httpx.AsyncClient
    dispatcher: Dispatcher
    pods: PodTable
    follow_up: FollowUp
    releases: KVReleases
    metrics: RouterMetrics


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """Where one prompt is now: its place, and KV that waits for it."""

    placement: Placement
    leg_id: str
    kv_params: dict[str, Any] | None = None  # Any: vLLM's and ours differ; passed on as they are

    @property
    def one_leg(self) -> bool:
        return self.placement.first.role == COLOCATED


@dataclass(slots=True)
class Exchange:
    """One prompt through the pods. Iterate `events` once.

    `stage` is what it is in, by the names of TTFT's parts, then `answer` and `done`; `pod` is the pod that has it.
    """

    call: Call
    services: Services
    timing: Timing = field(init=False)
    stage: Stage = "queue"
    pod: str = ""
    _attempt: _Attempt | None = None
    _first_retries: int = 1
    _decode_retries: int = 1
    _avoid_first: frozenset[str] = frozenset()
    _avoid_decode: frozenset[str] = frozenset()
    _num_attempts: int = 0

    def __post_init__(self) -> None:
        self.timing = Timing(arrival_s=self.call.arrival_s)

    async def events(self) -> AsyncGenerator[list[str], None]:
        """Data of the answer's events, `[DONE]` left out, as many at a time as came together.

        Raises PodRefused, LegFailed and what `Dispatcher.place` raises; after the first event only LegFailed.
        """
        try:
            async with AsyncExitStack() as stack:
                events, batch = await self._opened(stack)
                while True:
                    data = [item for item in batch if item != DONE_DATA]
                    if data:
                        yield data
                    if len(data) < len(batch):
                        self.stage = "done"
                        return
                    following = await anext(events, None)
                    if following is None:
                        raise LegFailed("a stream ended without [DONE]", pod=self.pod, accepted=True)
                    batch = following
        finally:
            self._leave()

    def first_token(self, now_s: float) -> None:
        """The first content token of this prompt has left."""
        self.timing.first_token_s = now_s
        self.stage = "answer"
        timing, attempt = self.timing, self._attempt
        if attempt is not None and attempt.placement.decode is not None and timing.prefilled_s is not None:
            pod = attempt.placement.decode.endpoint.name
            self.services.follow_up.observe(pod, now_s - timing.prefilled_s)

    async def _opened(self, stack: AsyncExitStack) -> tuple[AsyncIterator[list[str]], list[str]]:
        """The stream that answers the client, and its first events."""
        while True:
            attempt = await self._prefilled()
            try:
                return await self._open_stream(stack, attempt)
            except LegFailed as error:
                leg = "prefill" if attempt.one_leg else "decode"
                self._failed(leg, error)
                if not self._may_retry(leg, error):
                    raise

    async def _prefilled(self) -> _Attempt:
        """A place whose prefill leg has answered (in colocated mode: a place)."""
        while True:
            if self._attempt is not None:
                return self._attempt
            call, services = self.call, self.services
            self.stage, self.pod = "queue", ""
            placement = await services.dispatcher.place(
                call.request, num_sequences=call.num_choices, avoid=self._avoid_first
            )
            self._attempt = attempt = _Attempt(placement=placement, leg_id=self._next_leg_id())
            self.timing.dispatched_s = placement.dispatched_s
            self.stage, self.pod = "prefill", placement.first.name
            slack_s = call.request.deadline_s - placement.dispatched_s - placement.choice.work_s
            services.metrics.dispatched(call.slo.slo_class.name, placement.choice.kind, slack_s)
            if attempt.one_leg:
                return attempt
            try:
                attempt.kv_params = await self._prefill(attempt)
            except LegFailed as error:
                self._failed("prefill", error)
                if not self._may_retry("prefill", error):
                    raise
                continue
            placement.release_first(answered=True)
            self.timing.prefilled_s = services.clock.now_s()
            self.stage = "kv_transfer"
            return attempt

    def _next_leg_id(self) -> str:
        """The id under which pods know this attempt: what a failed one left behind is never taken for it."""
        self._num_attempts += 1
        suffix = f".{self._num_attempts}" if self._num_attempts > 1 else ""
        return f"{self.call.request_id}{suffix}"

    async def _prefill(self, attempt: _Attempt) -> dict[str, Any]:
        call, services, placement = self.call, self.services, attempt.placement
        decode = placement.decode
        follow_s = services.follow_up.p90_s(decode.endpoint.name) if decode is not None else 0.0
        body = legs.prefill_body(
            call.body,
            chat=call.api == "chat",
            budget_s=self._budget_s(follow_s),
            target_s=call.slo.ttft_s,
            slo_class=call.slo.slo_class.name,
        )
        headers = legs.leg_headers(call.headers, attempt.leg_id)
        pod = placement.first
        async with open_leg(services.http, pod, PATHS[call.api], body, headers) as response:
            answer = await read_json(pod, response)
        kv_params = legs.kv_params_of(answer)
        if kv_params is None:
            raise LegFailed(
                f"{pod.name} answered without {legs.KV_PARAMS}; a prefill pod with KV transfer is expected",
                pod=pod.name,
                accepted=True,
            )
        usage = answer.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("prompt_tokens"), int):
            call.measured(usage["prompt_tokens"])
        return kv_params

    async def _open_stream(
        self, stack: AsyncExitStack, attempt: _Attempt
    ) -> tuple[AsyncIterator[list[str]], list[str]]:
        call, services = self.call, self.services
        slo_class = call.slo.slo_class.name
        if attempt.kv_params is None:
            pod = attempt.placement.first
            body = legs.colocated_body(
                call.body, budget_s=self._budget_s(0.0), target_s=call.slo.ttft_s, slo_class=slo_class
            )
        else:
            pod = self._decode_pod(attempt)
            body = legs.decode_body(call.body, attempt.kv_params, slo_class=slo_class)
        self.pod = pod.name
        headers = legs.leg_headers(call.headers, attempt.leg_id)
        async with AsyncExitStack() as leg:
            response = await leg.enter_async_context(
                open_leg(services.http, pod, PATHS[call.api], body, headers)
            )
            if attempt.kv_params is not None:
                self.timing.decoding_s = services.clock.now_s()
                self.stage = "first_decode"
            events = read_events(pod, response)
            leg.push_async_callback(events.aclose)  # type: ignore[attr-defined]  # it is an async generator
            first = await anext(events, None)
            if first is None:
                raise LegFailed(f"{pod.name} ended its answer before it began", pod=pod.name, accepted=True)
            _raise_error_event(pod.name, first[0])
            attempt.placement.release_first(answered=True)
            attempt.kv_params = None  # pulled: nothing is left to give back
            await stack.enter_async_context(leg.pop_all())
            return events, first

    def _decode_pod(self, attempt: _Attempt) -> Endpoint:
        placement = attempt.placement
        chosen = placement.decode
        if chosen is None or chosen.endpoint.name in self._avoid_decode:
            picked = self.services.pods.pick_decode(placement.first.revision, self._avoid_decode)
            if picked is not None:
                placement.hold_decode(picked, self.call.num_choices)
                chosen = picked
        if chosen is None:
            raise LegFailed("no decode pod of this revision is left", pod="", accepted=False)
        return chosen.endpoint

    def _budget_s(self, follow_s: float) -> float:
        spent_s = self.services.clock.now_s() - self.call.arrival_s
        return remaining_budget_s(target_s=self.call.slo.ttft_s, spent_s=spent_s, follow_s=follow_s)

    def _failed(self, leg: str, error: LegFailed) -> None:
        self.services.metrics.leg_failed(leg)
        self.services.pods.suspect(error.pod)
        log.info(
            "leg failed",
            extra={"request_id": self.call.request_id, "leg": leg, "pod": error.pod, "reason": str(error)},
        )

    def _may_retry(self, leg: str, error: LegFailed) -> bool:
        """Spend a retry if one is left, and put away what the failed attempt holds."""
        if leg == "prefill":
            if not self._first_retries:
                return False
            self._first_retries -= 1
            self._avoid_first |= {error.pod}
            self._leave()
        else:
            if not self._decode_retries:
                return False
            self._decode_retries -= 1
            self._avoid_decode |= {error.pod}
            if error.accepted:
                self._leave()
        self.services.metrics.leg_retried(leg)
        return True

    def _leave(self) -> None:
        """Give back the place, and KV that waits at the prefill pod."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        attempt.placement.release()
        if attempt.kv_params:
            remote_id = attempt.kv_params.get("remote_request_id")
            remote_id = remote_id if isinstance(remote_id, str) and remote_id else attempt.leg_id
            headers = legs.leg_headers(self.call.headers, attempt.leg_id)
            if self.services.releases.start(attempt.placement.first, remote_id, headers):
                self.services.metrics.kv_released()


def _raise_error_event(pod: str, data: str) -> None:
    """A stream that begins with an error has failed as a whole; nothing of it has left yet."""
    if '"error"' not in data[:64]:
        return
    with suppress(ValueError):
        error = json.loads(data).get("error")
        if error:
            raise LegFailed(f"{pod} answered with an error: {str(error)[:200]}", pod=pod, accepted=True)
