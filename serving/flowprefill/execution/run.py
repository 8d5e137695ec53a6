"""What the pool knows of one submitted task."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from flowprefill.clock import Signal
from flowprefill.engines.protocol import Plan
from flowprefill.execution.gate import PreemptionGate
from flowprefill.scheduling.actions import Task
from flowprefill.scheduling.events import Progress

ItemT = TypeVar("ItemT")


class Run(Generic[ItemT]):
    """One task on its way through the engine. Fields are written under the pool's lock.

    `executed_s` is the time with the baton over all finished stints; `stint_began_s` is when the present one
    began, None without the baton. `plan` is None until the task's thread has laid out the batch.
    """

    __slots__ = ("executed_s", "gate", "items", "plan", "stint_began_s", "task")

    def __init__(
        self,
        task: Task,
        items: Sequence[ItemT],
        lock: threading.Lock,
        wake: Signal,
        on_park: Callable[[Run[ItemT], int], None],
    ) -> None:
        self.task = task
        self.items: Sequence[ItemT] = items
        self.gate = PreemptionGate(lock, wake, lambda ticket: on_park(self, ticket))
        self.plan: Plan | None = None
        self.executed_s = 0.0
        self.stint_began_s: float | None = None

    def progress(self, now_s: float | None = None) -> Progress:
        """Work and time behind this task; `now_s` is needed while it has the baton."""
        executed_s = self.executed_s
        if self.stint_began_s is not None and now_s is not None:
            executed_s += now_s - self.stint_began_s
        work_done = 0.0 if self.plan is None else self.plan.work_done(self.gate.index)
        return Progress(task_id=self.task.task_id, work_done=work_done, executed_s=executed_s)

    def forget(self) -> None:
        """Let go of the batch, which an idle thread would otherwise keep alive."""
        self.items = ()
        self.plan = None
