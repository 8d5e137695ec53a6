"""The tasks in the engine: the one with the baton, the parked ones, and the pause asked for.

Tickets strictly increase. `open_tickets` of a task are the pauses asked for since it last got the baton.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowprefill.scheduling.actions import Preempt, WithdrawPreempt
from flowprefill.scheduling.state import ActiveTask, Member


class TaskTable:
    """Submitted tasks until they end, found by task or by member."""

    def __init__(self) -> None:
        self.running: ActiveTask | None = None
        self.pending: Preempt | None = None
        self._tasks: dict[int, ActiveTask] = {}
        self._members: dict[str, tuple[ActiveTask, Member]] = {}
        self._last_task_id = 0
        self._last_ticket = 0

    def __len__(self) -> int:
        return len(self._tasks)

    def get(self, task_id: int) -> ActiveTask | None:
        return self._tasks.get(task_id)

    def all(self) -> Sequence[ActiveTask]:
        return tuple(self._tasks.values())

    def parked(self) -> Sequence[ActiveTask]:
        """Tasks without the baton, those being unwound included."""
        return tuple(task for task in self._tasks.values() if task is not self.running)

    def member(self, request_id: str) -> tuple[ActiveTask, Member] | None:
        return self._members.get(request_id)

    def new_id(self) -> int:
        self._last_task_id += 1
        return self._last_task_id

    def start(self, task: ActiveTask) -> None:
        """The task is submitted and has the baton."""
        assert self.running is None, f"task {self.running.task_id} runs already"
        self._tasks[task.task_id] = self.running = task
        for member in task.members:
            self._members[member.waiting.request_id] = (task, member)

    def resume(self, task: ActiveTask) -> None:
        assert self.running is None, f"task {self.running.task_id} runs already"
        assert task.ending == "no", f"task {task.task_id} is being unwound"
        self.running = task

    def park(self, task_id: int, ticket: int) -> bool:
        """Believe a Parked if its ticket is open; whether it was believed."""
        task = self.running
        if task is None or task.task_id != task_id or ticket not in task.open_tickets:
            return False
        task.open_tickets.clear()
        self.running = self.pending = None
        return True

    def remove(self, task_id: int) -> ActiveTask | None:
        """The task has ended; None when it is unknown."""
        task = self._tasks.pop(task_id, None)
        if task is None:
            return None
        for member in task.members:
            del self._members[member.waiting.request_id]
        if task is self.running:
            self.running = self.pending = None
        return task

    def ask_to_pause(self) -> Preempt:
        """A new pause of the running task."""
        assert self.running is not None, "nothing runs that could pause"
        assert self.pending is None, f"asked already, ticket {self.pending.ticket}"
        self._last_ticket += 1
        self.pending = Preempt(task_id=self.running.task_id, ticket=self._last_ticket)
        self.running.open_tickets.add(self._last_ticket)
        return self.pending

    def withdraw(self) -> WithdrawPreempt:
        """Take the pending pause back. Its ticket stays open: the task may have parked already."""
        assert self.pending is not None, "no pause is pending"
        pending, self.pending = self.pending, None
        return WithdrawPreempt(task_id=pending.task_id, ticket=pending.ticket)
