"""Prefills, seen from the event loop: submit to the scheduler's thread, await the outcome, hold the KV.

The service is the scheduler driver's listener and its source of token ids. A request whose waiter has gone is
cancelled, or, when it completed meanwhile, its KV is released at once: nothing stays that nobody will fetch.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowprefill.clock import Clock
from flowprefill.engines.protocol import GREEDY, PrefillItem, SamplingParams
from flowprefill.errors import EngineFailed, FlowPrefillError, QueueFull, Shed, Unavailable
from flowprefill.execution.driver import SchedulerDriver
from flowprefill.execution.results import Finished, FinishedPrefill
from flowprefill.metrics.engine import EngineMetrics
from flowprefill.request import Request
from flowprefill.scheduling.actions import Action, Outcome, Task
from flowprefill.scheduling.events import Event
from flowprefill.scheduling.kv import KVCachePool, prefix_hashes
from flowprefill.scheduling.snapshot import SchedulerSnapshot
from flowprefill.server.slo import Slo

log = logging.getLogger(__name__)

MAX_REPORTED_PREFIXES = 1024


@dataclass(slots=True, kw_only=True)
class _Pending:
    token_ids: Sequence[int]
    sampling: SamplingParams
    finished: asyncio.Future[FinishedPrefill]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerView:
    """The scheduler's last word: its snapshot and the newest cached prefixes."""

    snapshot: SchedulerSnapshot
    cached_prefixes: tuple[int, ...]


class PrefillService:
    """Runs prefills on one scheduler. `connect` comes before the first request."""

    def __init__(self, clock: Clock, kv: KVCachePool, metrics: EngineMetrics) -> None:
        self._clock = clock
        self._kv = kv
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._driver: SchedulerDriver | None = None
        self._pending: dict[str, _Pending] = {}
        self._view: SchedulerView | None = None
        self._cache_version = -1
        self._on_view: Callable[[], None] = lambda: None
        self._on_crash: Callable[[str], None] = lambda reason: None

    def connect(
        self, driver: SchedulerDriver, *, on_view: Callable[[], None], on_crash: Callable[[str], None]
    ) -> None:
        """`on_view` is called on the event loop after every scheduling turn, `on_crash` when there are no more."""
        self._driver = driver
        self._on_view = on_view
        self._on_crash = on_crash

    @property
    def view(self) -> SchedulerView | None:
        """The scheduler's state after its last turn; None before the first."""
        return self._view

    @property
    def driver(self) -> SchedulerDriver:
        assert self._driver is not None, "connect comes first"
        return self._driver

    async def prefill(
        self, token_ids: Sequence[int], slo: Slo, sampling: SamplingParams = GREEDY
    ) -> FinishedPrefill:
        """Compute the prompt's KV, and the answer's first token by `sampling`. The caller owns the blocks afterwards and gives them back by `release`.

        Raises `QueueFull`, `Shed`, `EngineFailed` or `Unavailable`. Cancelling it cancels the work.
        """
        request_id = uuid.uuid4().hex
        now_s = self._clock.now_s()
        request = Request(
            request_id=request_id,
            num_prompt_tokens=len(token_ids),
            arrival_s=now_s,
            deadline_s=now_s + slo.budget_s,
            ttft_slo_s=slo.ttft_s,
            slo_class=slo.slo_class,
            weight=slo.weight,
            shed_when_infeasible=slo.shed_when_infeasible,
            prefix_hashes=prefix_hashes(token_ids, self._kv.block_size),
        )
        finished: asyncio.Future[FinishedPrefill] = self._loop.create_future()
        self._pending[request_id] = _Pending(token_ids=token_ids, sampling=sampling, finished=finished)
        try:
            self.driver.submit([request])
        except BaseException:
            del self._pending[request_id]
            raise
        try:
            result = await finished
        except asyncio.CancelledError:
            if finished.done() and not finished.cancelled() and finished.exception() is None:
                self.driver.release([request_id])
            else:
                self.driver.cancel(request_id)
            raise
        self._metrics.pod.prompt(result.num_tokens, result.num_cached_tokens)
        return result

    def release(self, request_id: str) -> None:
        """The blocks of a finished prefill may be reused."""
        self.driver.release([request_id])

    # The scheduler's thread.

    def payload(self, task: Task) -> Sequence[PrefillItem]:
        """What the engine needs to run `task`."""
        return [
            PrefillItem(
                request_id=item.request_id,
                token_ids=self._pending[item.request_id].token_ids[item.start : item.start + item.num_tokens],
                start=item.start,
                block_ids=item.block_ids,
                sample=item.completes,
                sampling=self._pending[item.request_id].sampling,
            )
            for item in task.items
        ]

    def on_finish(self, request_id: str, outcome: Outcome, reason: str, result: Finished | None) -> None:
        self._cross(lambda: self._finished(request_id, outcome, reason, result))

    def on_events(self, event: Event, actions: Sequence[Action], now_s: float) -> None:
        self._metrics.scheduler.round_took(self._clock.now_s() - now_s)
        self._metrics.scheduler.observe(event, actions, now_s)

    def on_state(self, snapshot: SchedulerSnapshot) -> None:
        prefixes = self._view.cached_prefixes if self._view is not None else ()
        if self._kv.cache_version != self._cache_version:
            self._cache_version = self._kv.cache_version
            prefixes = self._kv.cached_hashes(MAX_REPORTED_PREFIXES)
        self._view = SchedulerView(snapshot=snapshot, cached_prefixes=prefixes)
        self._cross(self._on_view)

    def on_crash(self, error: BaseException) -> None:
        self._cross(lambda: self._on_crash(f"the scheduler crashed: {type(error).__name__}: {error}"))

    def _cross(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed: nobody listens any more
            log.debug("a scheduler's event came after the loop's end")

    # The event loop.

    def _finished(self, request_id: str, outcome: Outcome, reason: str, result: Finished | None) -> None:
        pending = self._pending.pop(request_id)
        if isinstance(result, FinishedPrefill):
            if pending.finished.done():
                self.driver.release([request_id])
            else:
                pending.finished.set_result(result)
        elif not pending.finished.done():
            pending.finished.set_exception(_error(outcome, reason))


def _error(outcome: Outcome, reason: str) -> FlowPrefillError:
    match outcome:
        case "rejected":
            return QueueFull(reason)
        case "shed":
            return Shed(reason)
        case "cancelled":
            return Unavailable(reason or "the pod is stopping")
        case _:
            return EngineFailed(reason or "the engine failed while it ran this prompt")
