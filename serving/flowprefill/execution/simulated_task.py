"""One task in simulated time: where it is, when it stops, and what it then reports.

It keeps the rules of the gate and of the simulated engine, and their arithmetic: a point's instant is
`began + (offset(point) - base)`, where a stint began and from which offset it went on.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowprefill.engines.simulated.timetable import Timetable
from flowprefill.scheduling.actions import Task
from flowprefill.scheduling.events import Completed, Failed, Parked, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """How a task fails: on reaching point `at_point`, or while it is unwound (`on_unwind`). `error` is reported."""

    error: str
    at_point: int | None = None
    on_unwind: bool = False


class SimulatedTask:
    """A submitted task. It is born with the baton, at `now_s`, and runs once it is woken."""

    __slots__ = (
        "_awake",
        "_base_s",
        "_began_s",
        "_executed_s",
        "_fault",
        "_index",
        "_next",
        "_started",
        "_stint_began_s",
        "_timetable",
        "cancelled",
        "ended",
        "parked",
        "task",
        "ticket",
    )

    def __init__(self, task: Task, timetable: Timetable, fault: Fault | None, now_s: float) -> None:
        self.task = task
        self.ticket: int | None = None
        self.cancelled = False
        self.parked = False
        self.ended = False
        self._timetable = timetable
        self._fault = fault
        self._index = 0  # the last point passed
        self._next = 0  # the next point to pass
        self._started = False
        self._awake = False  # whether it has run since it last got the baton
        self._began_s = self._base_s = 0.0
        self._executed_s = 0.0
        self._stint_began_s: float | None = now_s

    def give_baton(self, now_s: float) -> None:
        """Resume a parked task; it goes on once it is woken."""
        assert self.parked, "only a parked task can be resumed"
        self.parked = False
        self._stint_began_s = now_s

    def wake(self, now_s: float) -> bool:
        """Let the task run on at `now_s`; whether it stops at this very instant."""
        if self.cancelled or (self._started and self.ticket is not None):
            return True
        self._began_s = now_s
        if self._started:
            self._base_s = self._timetable.offset_s(self._index)
            self._next = self._index + 1
        self._started = self._awake = True
        return self.stop_s() <= now_s

    def stop_s(self) -> float:
        """When the task stops next, if nothing else happens before."""
        stop = self._stop_point()
        offset_s = self._timetable.total_s if stop is None else self._timetable.offset_s(stop)
        return self._began_s + (offset_s - self._base_s)

    def progress(self, now_s: float) -> Progress:
        """Work and time behind the task with the baton."""
        self._advance(now_s)
        assert self._stint_began_s is not None
        return self._report(self._executed_s + (now_s - self._stint_began_s))

    def stop(self, now_s: float) -> Parked | Completed | Failed:
        """Stop now, as `wake` or `stop_s` said it would: park, end or fail."""
        stop = self._stop_point() if self._awake else self._index
        faulty = self._awake and stop is not None and stop == self._fault_point()
        if self._stint_began_s is not None:
            self._executed_s += now_s - self._stint_began_s
            self._stint_began_s = None
        self._awake = False
        task_id = self.task.task_id
        if stop is not None and not faulty and not self.cancelled:
            assert self.ticket is not None
            self._index = stop
            self.parked = True
            ticket, self.ticket = self.ticket, None
            return Parked(task_id=task_id, ticket=ticket, progress=self._report(self._executed_s))
        self.ended = True
        if stop is None:
            return Completed(task_id=task_id, executed_s=self._executed_s)
        error = None
        if self._fault is not None and (faulty or (self._started and self._fault.on_unwind)):
            error = self._fault.error
        return Failed(task_id=task_id, error=error, executed_s=self._executed_s)

    def parked_again(self, ticket: int) -> Parked:
        """The answer to a request that finds the task parked already."""
        return Parked(task_id=self.task.task_id, ticket=ticket, progress=self._report(self._executed_s))

    def _stop_point(self) -> int | None:
        """The point at which the task stops next; None when that is its end."""
        fault = self._fault_point()
        wanted = self.ticket is not None or self.cancelled
        if wanted and self._next < self._timetable.num_points:
            return self._next if fault is None else min(self._next, fault)
        return fault

    def _fault_point(self) -> int | None:
        if self._fault is None or self._fault.at_point is None:
            return None
        point = self._fault.at_point
        return point if self._next <= point < self._timetable.num_points else None

    def _advance(self, now_s: float) -> None:
        """Pass every point up to `now_s`."""
        if not self._awake:
            return
        table = self._timetable
        last = table.num_points - 1
        index = min(max(table.last_point(self._base_s + (now_s - self._began_s)), self._next - 1), last)
        while index < last and self._began_s + (table.offset_s(index + 1) - self._base_s) <= now_s:
            index += 1
        while index >= self._next and self._began_s + (table.offset_s(index) - self._base_s) > now_s:
            index -= 1
        if index >= self._next:
            self._index = index
            self._next = index + 1

    def _report(self, executed_s: float) -> Progress:
        work_done = self._timetable.work_done(self._index)
        return Progress(task_id=self.task.task_id, work_done=work_done, executed_s=executed_s)
