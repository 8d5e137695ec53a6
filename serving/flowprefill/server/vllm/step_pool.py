"""Where steps run, as the engine core's loop uses it: in this process (`TaskPool`) or on several ranks (`ranks.pool`)."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from flowprefill.errors import EngineFailed
from flowprefill.execution.pool import TaskEvent
from flowprefill.scheduling.actions import Granularity, Task
from flowprefill.scheduling.events import Completed, Progress

if TYPE_CHECKING:
    from flowprefill.engines.vllm_engine.steps import Step


class StepPool(Protocol):
    """`execution.pool` has the rules. Called by the scheduler's thread."""

    def connect(
        self, post: Callable[[TaskEvent], None], on_broken: Callable[[BaseException], None] | None = None
    ) -> None: ...

    def submit(self, task: Task, items: Sequence[Step]) -> None: ...

    def preempt(self, task_id: int, ticket: int) -> None: ...

    def withdraw(self, task_id: int, ticket: int) -> None: ...

    def resume(self, task_id: int) -> None: ...

    def cancel(self, task_id: int) -> None: ...

    def progress(self) -> Progress | None: ...

    def take_results(self, task_id: int) -> tuple[Any, ...]: ...

    def close(self) -> None: ...


class StepRunner(Protocol):
    """What there is of steps beside the pool."""

    @property
    def num_slots(self) -> int:
        """Steps that can be in flight."""
        ...

    @property
    def num_points(self) -> Mapping[Granularity, int]:
        """Points of one forward."""
        ...

    def run_empty(self, output: Any) -> Any:
        """Run a step without tokens, now; only when no task advances. Its result."""
        ...

    def take_left_behind(self, task_id: int) -> Any:
        """What the KV connector said in a step that did not end; None when it said nothing. Once."""
        ...


def run_alone(pool: StepPool, task: Task, step: Step) -> tuple[Any, float]:
    """Run a step to its end, with nothing else in the pool: its result, and the seconds that it took.

    For the time before a loop is connected. Raises EngineFailed when it fails.
    """
    events: queue.SimpleQueue[TaskEvent | BaseException] = queue.SimpleQueue()
    pool.connect(events.put, events.put)
    pool.submit(task, [step])
    event = events.get()
    if not isinstance(event, Completed):
        raise event if isinstance(event, BaseException) else EngineFailed(f"a step alone ended with {event}")
    (result,) = pool.take_results(task.task_id)
    return result, event.executed_s
