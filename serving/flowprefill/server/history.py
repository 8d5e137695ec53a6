"""What the pod's last tasks took and how long preemptions blocked, for people and benchmarks.

Served as `GET /v1/history` on the admin port. Metrics give distributions over all time in buckets; this gives
exact values of the recent past, bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from flowprefill.scheduling.actions import Action, Preempt, Submit, Task, WithdrawPreempt
from flowprefill.scheduling.events import Completed, Event, Failed, Parked

KEPT_TASKS = 2048
KEPT_PREEMPTIONS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTask:
    """A completed task. Seconds; `items` are (request id, new tokens, tokens before them) of each member.

    `predicted_s` was said when the task was submitted; `executed_s` is its time with the baton.
    """

    task_id: int
    items: tuple[tuple[str, int, int], ...]
    predicted_s: float
    executed_s: float
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """One answered pause request: `blocking_s` from the request to the task's ACK (or its end, if that came first)."""

    task_id: int
    blocking_s: float


class History:
    """Collects from the scheduler's events and actions; belongs to the scheduler's thread, read from any."""

    def __init__(self) -> None:
        self._tasks: deque[FinishedTask] = deque(maxlen=KEPT_TASKS)
        self._preemptions: deque[Preemption] = deque(maxlen=KEPT_PREEMPTIONS)
        self._running: dict[int, Task] = {}
        self._counts: dict[int, int] = {}
        self._asked_s: dict[int, float] = {}

    def record(self, event: Event, actions: Sequence[Action], now_s: float) -> None:
        """Take one decision of the scheduler into account."""
        match event:
            case Parked(task_id=task_id):
                self._answered(task_id, now_s)
                self._counts[task_id] = self._counts.get(task_id, 0) + 1
            case Completed(task_id=task_id, executed_s=executed_s):
                self._answered(task_id, now_s)
                task = self._running.pop(task_id, None)
                count = self._counts.pop(task_id, 0)
                if task is not None and task.kind == "prefill":
                    self._tasks.append(
                        FinishedTask(
                            task_id=task_id,
                            items=tuple(
                                (item.request_id, item.num_tokens, item.start) for item in task.items
                            ),
                            predicted_s=task.predicted_s,
                            executed_s=executed_s,
                            preemptions=count,
                        )
                    )
            case Failed(task_id=task_id):
                self._asked_s.pop(task_id, None)
                self._running.pop(task_id, None)
                self._counts.pop(task_id, None)
            case _:
                pass
        for action in actions:
            match action:
                case Submit(task=task):
                    self._running[task.task_id] = task
                case Preempt(task_id=task_id):
                    self._asked_s[task_id] = now_s
                case WithdrawPreempt(task_id=task_id):
                    self._asked_s.pop(task_id, None)
                case _:
                    pass

    def _answered(self, task_id: int, now_s: float) -> None:
        asked_s = self._asked_s.pop(task_id, None)
        if asked_s is not None:
            self._preemptions.append(Preemption(task_id=task_id, blocking_s=now_s - asked_s))

    def as_json(self) -> dict[str, object]:
        """Both lists, oldest first. Copies, so that a reader in another thread sees whole entries."""
        return {
            "tasks": [asdict(task) for task in tuple(self._tasks)],
            "preemptions": [asdict(preemption) for preemption in tuple(self._preemptions)],
        }
