"""A vLLM step as a task of the execution pool: one `SchedulerOutput` in, one `ModelRunnerOutput` out.

The pool's thread takes the step's slot, runs the worker's stock `execute_model` and `sample_tokens` with that slot's runner, and
gives the slot back. A step that is unwound leaves behind what its KV connector had to say (`left_behind`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flowprefill.engines.protocol import EngineBroken, Gate, Plan
from flowprefill.engines.vllm_engine.points import PointCounts
from flowprefill.engines.vllm_engine.slots import Slot, Slots
from flowprefill.engines.vllm_engine.stint import Stage, Stint
from flowprefill.engines.window import LaunchWindow
from flowprefill.scheduling.actions import Granularity, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What vLLM's scheduler says of a batch, the slot that it runs in, and the grammar's bitmask where answers are constrained."""

    output: Any
    slot: int
    grammar: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A step with the points that its forward passes."""

    task_id: int
    step: Step
    num_points: int
    granularity: Granularity
    max_points_between_collectives: int = 1

    def work_done(self, index: int) -> float:
        return min(index / self.num_points, 1.0)


class StepWorker(Protocol):
    """The worker as a step's thread uses it."""

    stage: Stage
    slots: Slots
    points: PointCounts
    num_points: Mapping[Granularity, int]

    def using(self, slot: Slot) -> AbstractContextManager[None]:
        """Inside, this thread's model runner is the slot's."""
        ...

    def new_window(self, num_tokens: int) -> LaunchWindow | None:
        """What bounds the launches of a step with so many tokens; None for short ones and where nothing runs ahead."""
        ...

    def execute_model(self, scheduler_output: Any) -> Any: ...

    def sample_tokens(self, grammar_output: Any) -> Any: ...


class StepEngine:
    """Runs steps on one worker in this process. Implements `execution.worker.TaskEngine`."""

    def __init__(
        self, worker: StepWorker, thread_context: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._worker = worker
        self._thread_context = thread_context
        self._left_behind: dict[int, Any] = {}

    @property
    def num_slots(self) -> int:
        """Steps that can be in flight."""
        return len(self._worker.slots.all)

    @property
    def num_points(self) -> Mapping[Granularity, int]:
        """Points of one forward."""
        return self._worker.num_points

    @property
    def num_meetings(self) -> int:
        """Collectives of all ranks behind the step whose code runs now, as its points count them."""
        stint = self._worker.stage.stint
        return 0 if stint is None else stint.num_meetings

    def thread_context(self) -> AbstractContextManager[object]:
        return self._thread_context()

    def plan(self, task: Task, items: Sequence[Step]) -> Plan:
        (step,) = items
        return StepPlan(
            task_id=task.task_id,
            step=step,
            num_points=self._worker.points.of(
                _batch(step.output), task.granularity, self._worker.stage.limits
            ),
            granularity=task.granularity,
        )

    def run(self, plan: Plan, gate: Gate) -> Sequence[Any]:
        assert isinstance(plan, StepPlan)
        worker, step = self._worker, plan.step
        slot = worker.slots.take(step.slot)
        try:
            window = worker.new_window(step.output.total_num_scheduled_tokens)
            with Stint(worker.stage, gate, plan.granularity, window), worker.using(slot):
                worker.slots.prepare(slot, step.output)
                try:
                    return (self._result(step),)
                except torch.AcceleratorError as error:
                    raise EngineBroken(f"the device failed: {error}") from error
                except BaseException:
                    self._left_behind[plan.task_id] = slot.abandon()
                    raise
        finally:
            worker.slots.give_back(slot)

    def run_empty(self, output: Any) -> Any:
        """A step without tokens, in the caller's thread; only when no task advances.

        It has a slot to itself: a runner drops rows that a step does not name, and parked steps still need theirs.
        """
        assert output.total_num_scheduled_tokens == 0, "an empty step has no tokens"
        worker = self._worker
        slot = worker.slots.spare
        with worker.stage.exclusive, worker.using(slot):
            worker.slots.prepare(slot, output)
            return worker.execute_model(output)

    def take_left_behind(self, task_id: int) -> Any:
        """What the KV connector said in a step that did not end; None when it said nothing. Once."""
        return self._left_behind.pop(task_id, None)

    def _result(self, step: Step) -> Any:
        result = self._worker.execute_model(step.output)
        if result is None:
            result = self._worker.sample_tokens(step.grammar)
        return result.get_output() if hasattr(result, "get_output") else result


def _batch(output: Any) -> list[tuple[int, int]]:
    """(New tokens, tokens in all) of each request in a step."""
    cached = output.scheduled_cached_reqs
    before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return [(num, before[request_id] + num) for request_id, num in output.num_scheduled_tokens.items()]
