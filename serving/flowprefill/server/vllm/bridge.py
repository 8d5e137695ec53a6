"""Carries a batch of our scheduler into vLLM and what comes of it back.

One task, one vLLM step: `begin` lets vLLM's scheduler allocate and describe the step, `end` takes its result, `end_early` what is left
of one that was unwound or failed. Owned by the engine core's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flowprefill.engines.vllm_engine.accounting import BlockAccounting
from flowprefill.engines.vllm_engine.scheduler import AllocatingScheduler
from flowprefill.engines.vllm_engine.steps import Step
from flowprefill.server.vllm.arrivals import vllm_id
from flowprefill.server.vllm.step_pool import StepRunner

NO_TASK = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A step as vLLM made it: None when it has no tokens. `left_out` are requests that vLLM did not take."""

    step: Step | None
    left_out: tuple[str, ...]


class StepBridge:
    """`emit` takes vLLM's outputs, by client.

    It also chooses each step's slot, so that all ranks of a split model take the same one: the lowest that no step is in.
    """

    def __init__(
        self,
        vllm: AllocatingScheduler,
        runner: StepRunner,
        emit: Callable[[Any], None],
    ) -> None:
        self._vllm = vllm
        self._runner = runner
        self._emit = emit
        self._steps: dict[int, Step] = {}
        self._free_slots = set(range(runner.num_slots))
        self.kv = BlockAccounting(vllm, vllm_id)

    def begin(self, task_id: int, ends: Mapping[str, int]) -> Begun:
        """Have vLLM schedule these requests, each up to its token `ends[request_id]`.

        All are left out when no slot is free: steps that unwind still stand in theirs.
        """
        if not self._free_slots:
            return Begun(step=None, left_out=tuple(ends))
        output = self._vllm.schedule_only(ends, task_id)
        taken = output.num_scheduled_tokens
        self.kv.scheduled(taken)
        left_out = tuple(request_id for request_id in ends if request_id not in taken)
        if not taken:
            self._deliver(output)
            return Begun(step=None, left_out=left_out)
        grammar = self._vllm.get_grammar_bitmask(output) if output.has_structured_output_requests else None
        step = Step(output=output, slot=min(self._free_slots), grammar=grammar)
        self._free_slots.remove(step.slot)
        self._steps[task_id] = step
        return Begun(step=step, left_out=left_out)

    def end(self, task_id: int, result: Any) -> tuple[str, ...]:
        """The step has run; the requests in it."""
        step = self._steps.pop(task_id)
        self._free_slots.add(step.slot)
        self._completed(step.output, result)
        return tuple(step.output.num_scheduled_tokens)

    def end_early(self, task_id: int) -> tuple[str, ...]:
        """The step was unwound, or the engine failed in it; the requests in it, as they were before."""
        step = self._steps.pop(task_id, None)
        if step is None:
            return ()
        self._free_slots.add(step.slot)
        self._vllm.unwound(step.output, self._runner.take_left_behind(task_id))
        return tuple(step.output.num_scheduled_tokens)

    def empty_step(self) -> None:
        """Carry finished ids and the KV connector's word between scheduler and workers. Only when no task advances."""
        self._deliver(self._vllm.schedule_only({}, NO_TASK))

    def probe(self, request_id: str) -> None:
        """Let vLLM look whether this blocked request is ready: a grammar compiled, KV loaded. Only when no task advances."""
        self._deliver(self._vllm.schedule_only({request_id: 0}, NO_TASK))

    @property
    def wants_empty_step(self) -> bool:
        """Whether an empty step would do something."""
        vllm = self._vllm
        return bool(vllm.finished_req_ids) or (vllm.connector is not None and vllm.has_requests())

    def _deliver(self, output: Any) -> None:
        self._completed(output, self._runner.run_empty(output))

    def _completed(self, output: Any, result: Any) -> None:
        entered = self._vllm.completed(output, result)
        for request_id, hashes in entered.hashes.items():
            self.kv.entered(request_id, hashes)
        if entered.outputs:
            self._emit(entered.outputs)
