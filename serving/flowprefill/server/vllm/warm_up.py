"""Measures prefill times inside vLLM's engine core, by requests of its own, before it takes any from outside."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from flowprefill.engines.protocol import EngineSpec
from flowprefill.engines.vllm_engine.scheduler import AllocatingScheduler
from flowprefill.engines.vllm_engine.steps import Step
from flowprefill.scheduling.actions import Task, TaskItem
from flowprefill.scheduling.profile import Profile
from flowprefill.server.profiling import measure
from flowprefill.server.vllm.bridge import NO_TASK
from flowprefill.server.vllm.step_pool import StepPool, StepRunner, run_alone


class WarmUp:
    """Runs single prefills. `block_hasher` is the engine core's, so that prefixes are found as later on."""

    def __init__(
        self,
        vllm: AllocatingScheduler,
        runner: StepRunner,
        pool: StepPool,
        spec: EngineSpec,
        block_hasher: Callable[[Any], Any] | None,
    ) -> None:
        self._vllm = vllm
        self._runner = runner
        self._pool = pool
        self._spec = spec
        self._block_hasher = block_hasher
        self._ids = itertools.count()

    def profile(self, budget_s: float) -> Profile:
        """Prefill times of this engine; about `budget_s` long. Leaves nothing behind."""
        # A prompt of the longest context leaves no room for the token that a step samples.
        spec = replace(self._spec, max_model_len=self._spec.max_model_len - 1)
        found = measure(self._passes, spec, budget_s)
        self._flush()
        self._vllm.reset_prefix_cache()
        return found

    def _passes(self, num_new: int, num_cached: int, repeats: int) -> list[float]:
        times = []
        for _ in range(repeats):
            salt = next(self._ids)
            if num_cached:
                self._prefill(salt, num_cached)
            times.append(self._prefill(salt, num_cached + num_new))
        return times

    def _prefill(self, salt: int, num_tokens: int) -> float:
        """Seconds of a prefill. Prompts with the same salt begin alike."""
        vocabulary = self._spec.vocab_size
        request = Request(
            request_id=f"warm-up-{next(self._ids)}",
            prompt_token_ids=[(i + 1) * (7919 + salt) % vocabulary for i in range(num_tokens)],
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._block_hasher,
        )
        self._vllm.add_request(request)
        output = self._vllm.schedule_only({request.request_id: num_tokens}, NO_TASK)
        item = TaskItem(
            request_id=request.request_id, start=0, num_tokens=num_tokens, block_ids=(), completes=True
        )
        task = Task(task_id=NO_TASK, items=(item,), predicted_s=0.0)
        result, took_s = run_alone(self._pool, task, Step(output=output, slot=0))
        self._vllm.completed(output, result)
        return took_s

    def _flush(self) -> None:
        output = self._vllm.schedule_only({}, NO_TASK)
        self._vllm.completed(output, self._runner.run_empty(output))
