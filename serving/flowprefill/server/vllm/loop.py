"""The engine core's busy loop: our scheduler decides, vLLM's allocates, one execution pool runs steps.

It stands where vLLM's own loop does (`EngineCoreProc.run_busy_loop`) and keeps its promises: client requests are handled in order, a
shutdown drains or aborts, utilities are answered between turns. It waits on vLLM's input queue; tasks' threads post a wake-up
into it, so nothing polls and nothing spins.

A turn is that of every driver (`execution.turns`): events in order, each with the running task's progress; then the next decode step
if its time has come; then a tick.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.engine import EngineCoreRequestType, FinishReason
from vllm.v1.request import RequestStatus

from flowprefill.clock import Timekeeper
from flowprefill.engines.vllm_engine.scheduler import AllocatingScheduler
from flowprefill.execution.turns import TickTimer, coalesce, with_progress
from flowprefill.scheduling.actions import (
    Action,
    Cancel,
    Finish,
    Preempt,
    Resume,
    Submit,
    Task,
    WithdrawPreempt,
)
from flowprefill.scheduling.events import (
    Arrival,
    Cancelled,
    CapacityFreed,
    Completed,
    Event,
    Failed,
    Reconfigured,
    Tick,
)
from flowprefill.scheduling.scheduler import Scheduler
from flowprefill.scheduling.settings import SchedulerSettings
from flowprefill.scheduling.snapshot import SchedulerSnapshot
from flowprefill.server.settings import scheduler_settings
from flowprefill.server.slo import slo_of
from flowprefill.server.vllm.arrivals import as_request, attempt_id, vllm_id
from flowprefill.server.vllm.bridge import StepBridge
from flowprefill.server.vllm.decode_steps import DecodeSteps
from flowprefill.server.vllm.recent_prefixes import RecentPrefixes
from flowprefill.server.vllm.step_pool import StepPool
from flowprefill_crd import LiveConfig

log = logging.getLogger(__name__)

WAKE_UP = (EngineCoreRequestType.WAKEUP, None)
EMPTY_STEP_INTERVAL_S = 0.003
"""How often an engine core without an advancing task asks the workers for the KV connector's news."""

BLOCKED = (
    RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
    RequestStatus.WAITING_FOR_REMOTE_KVS,
)

Heard = Callable[[Event, Sequence[Action], float, float], None]
"""`heard(event, actions, now_s, round_s)`: the scheduler took `round_s` seconds to answer `event` with `actions`."""


class PreemptiveLoop:
    """One engine core's loop. All methods are the engine core's thread's, except `post`."""

    def __init__(
        self,
        core: Any,
        pool: StepPool,
        scheduler: Scheduler,
        bridge: StepBridge,
        live: LiveConfig,
        clock: Timekeeper,
        *,
        num_slots: int,
        heard: Heard = lambda event, actions, now_s, round_s: None,
        seen: Callable[[SchedulerSnapshot, tuple[int, ...]], None] = lambda snapshot, cached_prefixes: None,
    ) -> None:
        """`pool` is this loop's, which closes it. `num_slots` steps at most are in flight. `heard` is told of every decision, `seen` after every turn in which something happened."""
        self._core = core
        self._vllm: AllocatingScheduler = core.scheduler
        self._scheduler = scheduler
        self._bridge = bridge
        self._live = live
        self._clock = clock
        self._num_slots = num_slots
        self._heard = heard
        self._seen = seen
        self._pool = pool
        self._pool.connect(self.post, self._broke)
        self._events: deque[Event] = deque()
        self._news: deque[Any] = deque()  # of the KV connector
        self._ticks = TickTimer()
        self._answers = DecodeSteps()
        self._prompts: set[str] = set()  # scheduler's ids without an outcome
        self._attempts: dict[str, int] = {}  # by vLLM's id, of requests that had to enter again
        self._blocked: dict[str, None] = {}
        self._prefixes = RecentPrefixes(bridge.kv.block_size)
        self._last_empty_s = 0.0
        self._broken: BaseException | None = None
        self._vllm.observer = self

    # Any thread.

    def post(self, event: Event) -> None:
        """Something happened; the loop looks at it next."""
        self._events.append(event)
        self._core.input_queue.put_nowait(WAKE_UP)

    def reconfigure(self, live: LiveConfig) -> None:
        """The live document changed."""
        self._live = live
        self.post(Reconfigured(settings=within_slots(scheduler_settings(live), self._num_slots)))

    def connector_news(self, news: Any) -> None:
        """The KV connector has finished transfers while a step ran."""
        self._news.append(news)
        self._core.input_queue.put_nowait(WAKE_UP)

    def _broke(self, error: BaseException) -> None:
        self._broken = error
        self._core.input_queue.put_nowait(WAKE_UP)

    # The loop.

    def run(self) -> None:
        """Until vLLM's shutdown has ended; then every task's thread is joined."""
        try:
            while self._core._handle_shutdown():
                self._wait()
                self._turn()
        finally:
            self._pool.close()

    def _wait(self) -> None:
        core = self._core
        if not core.has_work():
            core._notify_idle_state_callbacks()
        due_s = self._due_s()
        timeout = None if due_s is None else max(due_s - self._clock.now_s(), 0.0)
        if self._events:  # of the last turn's end
            timeout = 0.0
        try:
            core._handle_client_request(*core.input_queue.get(timeout=timeout))
            while True:
                core._handle_client_request(*core.input_queue.get_nowait())
        except queue.Empty:
            pass
        with core.aborts_queue.mutex:  # every abort comes by the input queue as well
            core.aborts_queue.queue.clear()
        if self._broken is not None:
            raise self._broken

    def _due_s(self) -> float | None:
        """When the next turn is due if nothing happens."""
        moments = [self._ticks.due_s(self._scheduler.next_tick_s), self._answers.enter_s]
        if self._pool.progress() is None and (self._bridge.wants_empty_step or self._blocked):
            moments.append(self._last_empty_s + EMPTY_STEP_INTERVAL_S)
        coming = [moment for moment in moments if moment is not None]
        return min(coming) if coming else None

    def _turn(self) -> None:
        while self._news:
            self._vllm.connector_said(self._news.popleft())
        happened = bool(self._events)
        while self._events:
            events = [self._events.popleft() for _ in range(len(self._events))]
            for event in coalesce(events):
                self._handle(event)
        happened |= self._enter_decode_step()
        due_s = self._ticks.due_s(self._scheduler.next_tick_s)
        if due_s is not None and due_s <= self._clock.now_s():
            self._handle(Tick())
            self._ticks.ticked(self._clock.now_s())
            happened = True
        self._keep_house()
        if happened:
            self._seen(self._scheduler.snapshot(self._clock.now_s()), self._prefixes.newest())

    def _handle(self, event: Event) -> None:
        event = with_progress(event, self._pool.progress())
        match event:
            case Completed():
                self._ended(event)
            case Failed():
                self._ended_early(event)
        now_s = self._clock.now_s()
        actions = self._scheduler.handle(event, now_s)
        self._heard(event, actions, now_s, self._clock.now_s() - now_s)
        for action in actions:
            self._carry_out(action)

    # Actions.

    def _carry_out(self, action: Action) -> None:
        match action:
            case Submit(task=task):
                self._keep_house()
                self._submit(task)
            case Preempt(task_id=task_id, ticket=ticket):
                self._pool.preempt(task_id, ticket)
            case WithdrawPreempt(task_id=task_id, ticket=ticket):
                self._pool.withdraw(task_id, ticket)
            case Resume(task_id=task_id):
                self._keep_house()
                self._pool.resume(task_id)
            case Cancel(task_id=task_id):
                self._pool.cancel(task_id)
            case Finish():
                self._finish(action)

    def _submit(self, task: Task) -> None:
        if task.kind == "decode":
            chosen = self._answers.longest_waiting(task.items[0].num_tokens)
            ends = {request_id: self._vllm.requests[request_id].num_tokens for request_id in chosen}
        else:
            ends = {vllm_id(item.request_id): item.start + item.num_tokens for item in task.items}
        begun = self._bridge.begin(task.task_id, ends)
        if task.kind == "decode":
            self._start_over_preempted(begun.left_out)
        elif begun.left_out:
            left_out = set(begun.left_out)
            self._enter_again([i.request_id for i in task.items if vllm_id(i.request_id) in left_out])
        if begun.step is None:
            self._events.append(Failed(task_id=task.task_id, error=None))
            return
        self._pool.submit(task, [begun.step])

    def _finish(self, finish: Finish) -> None:
        request_id = finish.request_id
        if self._answers.is_step(request_id):
            self._answers.ended(self._clock.now_s())
            return
        self._prompts.discard(request_id)
        request = self._vllm.requests.get(vllm_id(request_id))
        match finish.outcome:
            case "completed":
                self._events.append(CapacityFreed(request_ids=(request_id,)))
                if request is not None and request.prompt_token_ids and request.cache_salt is None:
                    self._prefixes.computed(request.prompt_token_ids)
                if request is not None and not request.is_finished():
                    tbt_s = slo_of(request.sampling_params.extra_args or {}, self._live).tbt_s
                    self._answers.add(request.request_id, now_s=self._clock.now_s(), tbt_slo_s=tbt_s)
            case "cancelled":
                pass  # vLLM knows already, or the request enters again
            case "failed" | "rejected" | "shed":
                self._give_up(request, finish.outcome, finish.reason)

    def _give_up(self, request: Any, outcome: str, reason: str) -> None:
        """Tell the client and vLLM that nothing comes of the request."""
        if request is None or request.is_finished():
            return
        log.warning("a request failed: %s (%s): %s", request.request_id, outcome, reason)
        self._vllm.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
        self._core._send_finish_outputs_to_client(
            [request.request_id], request.client_index, FinishReason.ERROR
        )

    # Steps that ended.

    def _ended(self, event: Completed) -> None:
        (result,) = self._pool.take_results(event.task_id)
        grown = self._bridge.end(event.task_id, result)
        self._answers.got_token(grown, self._clock.now_s())
        for request_id in grown:
            request = self._vllm.requests.get(request_id)
            if request is None or request.is_finished():
                self._answers.discard(request_id)

    def _ended_early(self, event: Failed) -> None:
        unwound = self._bridge.end_early(event.task_id)
        if event.error is None:
            return
        for request_id in unwound:
            if request_id in self._answers:
                self._answers.discard(request_id)
                self._give_up(self._vllm.requests.get(request_id), "failed", event.error)

    # Requests on their way in; `AllocatingScheduler.observer`.

    def added(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        if request.status in BLOCKED or (
            self._vllm.connector is not None and params.get("do_remote_prefill")
        ):
            self._blocked[request.request_id] = None
        else:
            self._arrive(request)

    def leaving(self, request_id: str) -> None:
        self._blocked.pop(request_id, None)
        self._answers.discard(request_id)
        attempt = self._attempts.pop(request_id, 0)
        self._events.append(Cancelled(request_id=attempt_id(request_id, attempt)))

    def freed(self) -> None:
        self._events.append(CapacityFreed(request_ids=()))

    def _arrive(self, request: Any) -> None:
        now_s = self._clock.now_s()
        attempt = self._attempts.get(request.request_id, 0)
        arrived = as_request(request, self._live, now_s=now_s, wall_s=time.time(), attempt=attempt)
        self._prompts.add(arrived.request_id)
        self._events.append(Arrival(requests=(arrived,)))

    def _arrive_anew(self, request: Any) -> None:
        """As one that has just come, under an id of its own: the scheduler takes each id once."""
        self._attempts[request.request_id] = self._attempts.get(request.request_id, 0) + 1
        self._arrive(request)

    def _enter_again(self, request_ids: Sequence[str]) -> None:
        """vLLM left these out of their batch: the batch goes on without them, and they wait as if they had just come."""
        for request_id in request_ids:
            self._bridge.kv.disown(request_id)
            self._events.append(Cancelled(request_id=request_id))
            request = self._vllm.requests.get(vllm_id(request_id))
            if request is not None:
                self._arrive_anew(request)

    def _start_over_preempted(self, left_out: Sequence[str]) -> None:
        """Answers that vLLM took the blocks of, for want of others: their tokens so far are prompts again."""
        for request_id in left_out:
            request = self._vllm.requests.get(request_id)
            if request is not None and request.status == RequestStatus.PREEMPTED:
                self._answers.discard(request_id)
                self._arrive_anew(request)

    # What no task does.

    def _enter_decode_step(self) -> bool:
        step = self._answers.next_step(
            self._clock.now_s(), at_once=not self._prompts, most=self._vllm.max_num_running_reqs
        )
        if step is None:
            return False
        self._handle(Arrival(requests=(step,)))
        return True

    def _keep_house(self) -> None:
        """Empty steps and looks at blocked requests, paced; only when no task advances."""
        now_s = self._clock.now_s()
        if self._pool.progress() is not None or now_s - self._last_empty_s < EMPTY_STEP_INTERVAL_S:
            return
        if not self._blocked and not self._bridge.wants_empty_step:
            return
        self._last_empty_s = now_s
        for request_id in tuple(self._blocked):
            self._bridge.probe(request_id)
            request = self._vllm.requests.get(request_id)
            if request is None or request.is_finished():
                self._blocked.pop(request_id, None)
            elif request.status not in BLOCKED:
                self._blocked.pop(request_id, None)
                self._arrive(request)
        if self._bridge.wants_empty_step:
            self._bridge.empty_step()


def within_slots(settings: SchedulerSettings, num_slots: int) -> SchedulerSettings:
    """The settings with `max_suspended` cut to what the worker has slots for; they are made once, at the start."""
    if settings.max_suspended < num_slots:
        return settings
    log.warning(
        "maxSuspended is %d and this engine was started with %d slots: at most %d steps are suspended until it is started anew",
        settings.max_suspended,
        num_slots,
        num_slots - 1,
    )
    return replace(settings, max_suspended=num_slots - 1)
