"""An error of the device is the end of the engine: whatever ran on it may be wrong."""

from __future__ import annotations

import pytest
import torch

from flowprefill.engines.protocol import EngineBroken
from flowprefill.scheduling.actions import Task, TaskItem
from support.vllm.bench import Bench
from support.vllm.tokens import random_prompt

VARIANTS = ("llama",)


class OpenGate:
    raised = False
    index = 0

    def pause(self, index: int) -> None:
        raise AssertionError


def test_it_is_no_failure_of_one_batch(bench: Bench) -> None:
    def fail() -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    bench.add("a", random_prompt(100, seed=1))
    begun = bench.bridge.begin(7, {"a": 100})
    assert begun.step is not None
    item = TaskItem(request_id="a", start=0, num_tokens=100, block_ids=(), completes=True)
    task = Task(task_id=7, items=(item,), predicted_s=0.0)
    bench.worker.stage.housekeeping = fail
    try:
        with bench.engine.thread_context(), pytest.raises(EngineBroken, match="illegal memory access"):
            bench.engine.run(bench.engine.plan(task, [begun.step]), OpenGate())
    finally:
        bench.worker.stage.housekeeping = bench._at_point
    bench.worker.slots.all[begun.step.slot].abandon()
    bench.bridge.end_early(7)
    bench.abort("a")
