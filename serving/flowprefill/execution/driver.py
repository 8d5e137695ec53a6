"""The scheduler's thread: events in, one decision at a time, actions out. It holds no policy.

It owns the scheduler and the clock: `now_s` enters only here. Servers put requests, cancellations and releases into
its bounded inbox from any thread; outcomes leave through the listener, on this thread. The rules of a turn are in
`turns.py`, where the simulator takes them from as well.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Literal, ParamSpec

from flowprefill.clock import Timekeeper
from flowprefill.errors import EngineFailed
from flowprefill.execution.inbox import Inbox
from flowprefill.execution.listener import DriverListener
from flowprefill.execution.pool import ExecutionPool, Items
from flowprefill.execution.results import FinishedPrefill, ResultBook
from flowprefill.execution.turns import TickTimer, coalesce, with_progress
from flowprefill.request import Request
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
    Cancelled,
    Completed,
    Event,
    Failed,
    Reconfigured,
    Tick,
)
from flowprefill.scheduling.scheduler import Scheduler
from flowprefill.scheduling.settings import SchedulerSettings
from flowprefill.scheduling.snapshot import SchedulerSnapshot

log = logging.getLogger(__name__)

P = ParamSpec("P")

DRIVER_RANK = 2
"""On a virtual clock a tick waits until tasks (0) and load (1) of the same instant have been heard."""

STOPPING = "the pod is stopping and takes no more requests"
CRASHED = "the scheduler stopped after an internal error; the pod must be restarted"


class SchedulerDriver:
    """Drives one scheduler over one execution pool in a thread of its own."""

    def __init__(
        self,
        scheduler: Scheduler,
        pool: ExecutionPool,
        clock: Timekeeper,
        payload: Callable[[Task], Items],
        listener: DriverListener,
        *,
        record: Callable[[Event, Sequence[Action], float], None] | None = None,
        inbox_limit: int = 4096,
    ) -> None:
        """`payload(task)` gives what the engine needs, one entry per item in order (tokens live with the server).

        `record(event, actions, now_s)` sees every decision (`recording.Recorder`). `inbox_limit` bounds the
        requests that the scheduler has not seen yet; it is not the scheduler's own queue.
        """
        self._scheduler = scheduler
        self._pool = pool
        self._clock = clock
        self._payload = payload
        self._listener = listener
        self._record = record
        self._inbox = Inbox(clock, limit=inbox_limit)
        self._results = ResultBook()
        self._ticks = TickTimer()
        self._snapshot = scheduler.snapshot(clock.now_s())
        self._thread: threading.Thread | None = None
        self._crashed: BaseException | None = None
        pool.connect(self._inbox.post, self._inbox.fail)

    # Any thread.

    def start(self) -> None:
        """Start the scheduler's thread."""
        assert self._thread is None, "a driver is started once"
        self._thread = self._clock.start_thread(self._main, name="scheduler", rank=DRIVER_RANK)

    def submit(self, requests: Sequence[Request], *, bounded: bool = True) -> None:
        """Hand requests to the scheduler, as one arrival, all or none. Each gets exactly one `on_finish`.

        Raises `QueueFull` when the inbox has no room (never for `bounded=False`, meant for decode steps, of which
        one at most is outstanding), `Unavailable` when the driver is closed or crashed, ValueError for a request
        id that is outstanding.
        """
        self._inbox.submit(requests, bounded=bounded)

    def cancel(self, request_id: str) -> None:
        """Nobody waits for this request any more. Unknown and finished ids are ignored."""
        self._inbox.post(Cancelled(request_id=request_id))

    def release(self, request_ids: Sequence[str]) -> None:
        """KV of these completed requests is no longer needed: their blocks return to the pool."""
        if request_ids:
            self._inbox.release(request_ids)

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """Take over new live settings."""
        self._inbox.post(Reconfigured(settings=settings))

    def snapshot(self) -> SchedulerSnapshot:
        """The scheduler's state after its last turn."""
        return self._snapshot

    @property
    def crashed(self) -> BaseException | None:
        """The internal error that ended the scheduler's thread, or None."""
        return self._crashed

    @property
    def num_outstanding(self) -> int:
        """Requests without an outcome yet; a server that drains waits until it is 0."""
        return self._inbox.num_outstanding

    def close(self) -> None:
        """End the thread; outstanding requests get the outcome `cancelled`; unwind all tasks and join all threads.

        Called by the driver's owner, from neither the scheduler's nor a task's thread. Later calls do nothing.
        """
        self._inbox.close(STOPPING)
        if self._thread is not None:
            self._thread.join()
        self._pool.close()

    # The scheduler's thread.

    def _main(self) -> None:
        try:
            while not self._inbox.closed:
                self._turn()
            self._settle_all("cancelled", STOPPING)
        except BaseException as error:  # top of the thread: nothing may hang because of it
            self._crash(error)

    def _turn(self) -> None:
        events = self._inbox.take(self._ticks.due_s(self._scheduler.next_tick_s))
        for event in coalesce(events):
            self._handle(event)
        due_s = self._ticks.due_s(self._scheduler.next_tick_s)
        ticks = due_s is not None and due_s <= self._clock.now_s()
        if ticks:
            self._handle(Tick())
            self._ticks.ticked(self._clock.now_s())
        if events or ticks:
            self._snapshot = self._scheduler.snapshot(self._clock.now_s())
            self._tell(self._listener.on_state, self._snapshot)

    def _handle(self, event: Event) -> None:
        event = with_progress(event, self._pool.progress())
        now_s = self._clock.now_s()
        match event:
            case Completed():
                task = self._results.completed(event.task_id, self._pool.take_results(event.task_id))
                self._inbox.task_ended(task)
            case Failed():
                self._inbox.task_ended(self._results.failed(event.task_id))
        actions = self._scheduler.handle(event, now_s)
        if self._record is not None:
            self._record(event, actions, now_s)
        self._tell(self._listener.on_events, event, actions, now_s)
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Submit(task=task):
                self._submit(task)
            case Preempt(task_id=task_id, ticket=ticket):
                self._pool.preempt(task_id, ticket)
            case WithdrawPreempt(task_id=task_id, ticket=ticket):
                self._pool.withdraw(task_id, ticket)
            case Resume(task_id=task_id):
                self._pool.resume(task_id)
            case Cancel(task_id=task_id):
                self._pool.cancel(task_id)
            case Finish():
                self._finish(action)

    def _submit(self, task: Task) -> None:
        self._results.submitted(task)
        self._inbox.task_began(task)
        try:
            items = self._payload(task)
        except Exception as error:  # the server's data for this batch is unusable: it fails as in the engine
            log.exception("no payload for a task", extra={"task_id": task.task_id})
            reason = EngineFailed(f"the batch could not be put together: {type(error).__name__}: {error}")
            self._inbox.post(Failed(task_id=task.task_id, error=str(reason)))
            return
        self._pool.submit(task, items)

    def _finish(self, finish: Finish) -> None:
        result = self._results.take(finish.request_id)
        if finish.outcome != "completed":
            result = None
        holds_blocks = isinstance(result, FinishedPrefill)
        settled = self._inbox.settled(finish.request_id, holds_blocks=holds_blocks)
        assert settled, f"a second outcome for request {finish.request_id}"
        self._tell(self._listener.on_finish, finish.request_id, finish.outcome, finish.reason, result)

    def _settle_all(self, outcome: Literal["cancelled", "failed"], reason: str) -> None:
        for request_id in self._inbox.outstanding():
            self._inbox.settled(request_id)
            self._tell(self._listener.on_finish, request_id, outcome, reason, None)

    def _crash(self, error: BaseException) -> None:
        log.critical("the scheduler's thread crashed", exc_info=error)
        self._crashed = error
        self._inbox.close(CRASHED)
        self._pool.stop()
        self._settle_all("failed", CRASHED)
        self._tell(self._listener.on_crash, error)

    def _tell(self, hear: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            hear(*args, **kwargs)
        except Exception:  # a listener's failure is its own: the scheduler goes on
            log.exception("a listener failed", extra={"callback": getattr(hear, "__name__", repr(hear))})
