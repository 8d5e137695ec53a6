"""The scheduler driven by a virtual clock in one thread: the same turns and task semantics, no threads, no engine.

It gives the same events, times and actions as the thread driver over the simulated engine on a virtual clock
(`tests/integration/execution`). What happens at one instant, in this order:

1. the running task passes the points it reaches, parks at one, or ends;
2. inputs (arrivals, cancellations, releases) of that instant, all in one turn;
3. a tick.

After each turn the tasks that it woke run, in the order in which they were woken, before time moves on.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

from flowprefill.engines.simulated.timetable import Timetable
from flowprefill.execution.simulated_task import Fault, SimulatedTask
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
    Event,
    Parked,
    Reconfigured,
    Tick,
)
from flowprefill.scheduling.scheduler import Scheduler

Input: TypeAlias = Arrival | Cancelled | CapacityFreed | Reconfigured


class Simulator:
    """Runs one scheduler over simulated time.

    `timetable(task)` says how long a task takes and where its points lie (`CostModel.prefill`). `on_finish` hears every
    outcome and may put in more by `at`, for instance the release of the blocks once they were pulled. `record` hears
    every decision. `fault(task)` makes a task fail.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        timetable: Callable[[Task], Timetable],
        *,
        on_finish: Callable[[Finish, float], None] | None = None,
        record: Callable[[Event, Sequence[Action], float], None] | None = None,
        fault: Callable[[Task], Fault | None] | None = None,
        start_s: float = 0.0,
    ) -> None:
        self.scheduler = scheduler
        self.now_s = start_s
        self.num_events = 0
        self._timetable = timetable
        self._on_finish = on_finish
        self._record = record
        self._fault = fault
        self._ticks = TickTimer()
        self._inputs: list[tuple[float, int, Input]] = []
        self._ids = itertools.count()
        self._tasks: dict[int, SimulatedTask] = {}
        self._holder: SimulatedTask | None = None
        self._woken: list[SimulatedTask] = []
        self._inbox: list[Event] = []

    def at(self, when_s: float, event: Input) -> None:
        """Let `event` happen at `when_s`, or now when that is past. Events of one instant keep their order."""
        heapq.heappush(self._inputs, (max(when_s, self.now_s), next(self._ids), event))

    def run(self, until_s: float | None = None) -> None:
        """Simulate until nothing is left to happen, or until the next thing would happen after `until_s`."""
        while (when_s := self._next_s()) is not None and (until_s is None or when_s <= until_s):
            self.now_s = max(self.now_s, when_s)
            self._happen()
            while True:
                self._turn()
                self._run_woken()
                if not self._inbox:
                    break

    def _next_s(self) -> float | None:
        stop_s = None if self._holder is None else self._holder.stop_s()
        input_s = self._inputs[0][0] if self._inputs else None
        tick_s = self._ticks.due_s(self.scheduler.next_tick_s)
        return min((t for t in (stop_s, input_s, tick_s) if t is not None), default=None)

    def _happen(self) -> None:
        """Put what happens now into the inbox; nothing there means that a tick is due."""
        if self._holder is not None and self._holder.stop_s() <= self.now_s:
            self._stop(self._holder)
            return
        while self._inputs and self._inputs[0][0] <= self.now_s:
            self._inbox.append(heapq.heappop(self._inputs)[2])

    def _turn(self) -> None:
        events, self._inbox = self._inbox, []
        for event in coalesce(events):
            self._handle(event)
        due_s = self._ticks.due_s(self.scheduler.next_tick_s)
        if due_s is not None and due_s <= self.now_s:
            self._handle(Tick())
            self._ticks.ticked(self.now_s)

    def _handle(self, event: Event) -> None:
        if self._holder is not None:
            event = with_progress(event, self._holder.progress(self.now_s))
        self.num_events += 1
        actions = self.scheduler.handle(event, self.now_s)
        if self._record is not None:
            self._record(event, actions, self.now_s)
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Submit(task=task):
                assert self._holder is None, "a second task was submitted"
                fault = None if self._fault is None else self._fault(task)
                self._holder = SimulatedTask(task, self._timetable(task), fault, self.now_s)
                self._tasks[task.task_id] = self._holder
                self._woken.append(self._holder)
            case Preempt(task_id=task_id, ticket=ticket):
                run = self._tasks.get(task_id)
                if run is not None and run.parked:
                    self._inbox.append(run.parked_again(ticket))
                elif run is not None:
                    run.ticket = ticket
            case WithdrawPreempt(task_id=task_id, ticket=ticket):
                run = self._tasks.get(task_id)
                if run is not None and run.ticket == ticket:
                    run.ticket = None
            case Resume(task_id=task_id):
                assert self._holder is None, "a second task was resumed"
                self._holder = self._tasks[task_id]
                self._holder.give_baton(self.now_s)
                self._woken.append(self._holder)
            case Cancel(task_id=task_id):
                run = self._tasks.get(task_id)
                if run is not None:
                    run.cancelled = True
                    if run.parked:
                        self._woken.append(run)
            case Finish():
                if self._on_finish is not None:
                    self._on_finish(action, self.now_s)

    def _run_woken(self) -> None:
        woken, self._woken = self._woken, []
        for run in woken:
            if run.ended:
                continue
            if run.wake(self.now_s):
                self._stop(run)

    def _stop(self, run: SimulatedTask) -> None:
        """The task parks or ends now."""
        event = run.stop(self.now_s)
        if self._holder is run:
            self._holder = None
        if not isinstance(event, Parked):
            del self._tasks[run.task.task_id]
        self._inbox.append(event)
