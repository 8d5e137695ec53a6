"""The engine that runs prefill and decode steps."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from flowprefill_crd.base import ApiObject, ImageName
from flowprefill_crd.rules import Rule

EngineType = Literal["torch", "vllm", "simulated"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class Engine(ApiObject):
    """The engine inside prefill and decode pods."""

    rules: ClassVar = (
        Rule(
            message="kvCacheTokens is below blockSize; use at least blockSize",
            cel="!has(self.kvCacheTokens) || self.kvCacheTokens >= self.blockSize",
            holds=lambda e: e.kv_cache_tokens is None or e.kv_cache_tokens >= e.block_size,
            field="kvCacheTokens",
            seen=lambda e: f"{e.kv_cache_tokens} below {e.block_size}",
        ),
    )

    type: EngineType = "torch"
    """Which engine runs: torch (Hugging Face models, on CPU and GPU), vllm (stock vLLM with our plugin) or
    simulated (sleeps as a cost model says; for tests). Restarts pods."""

    image: ImageName | None = None
    """Image of prefill and decode pods; the operator's default for the engine when absent. Restarts pods."""

    args: Annotated[tuple[Annotated[str, StringConstraints(max_length=1024)], ...], Field(max_length=64)] = ()
    """Further command line arguments for the engine, one string each. Restarts pods."""

    dtype: Dtype = "auto"
    """Number format of weights and KV cache; auto takes the model's own. Restarts pods."""

    kv_cache_tokens: Annotated[int, Field(ge=16, le=100_000_000)] | None = None
    """Size of each pod's KV cache, in tokens; derived from the memory of the pod when absent. Restarts pods."""

    block_size: Annotated[int, Field(ge=1, le=256)] = 16
    """Tokens in one block of the KV cache. Restarts pods."""

    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """CPU threads that one operator may use, on CPUs: of the torch engine and of vllm. Restarts pods."""

    operator_tile_tokens: Annotated[int, Field(ge=16, le=131_072)] | None = None
    """Most tokens that one operator works on between two preemption points; derived from
    maxGapMilliseconds when absent. Restarts pods."""

    max_gap_milliseconds: Annotated[int, Field(ge=1, le=10_000)] = 20
    """Longest time between two preemption points, in milliseconds. Long operators are cut into tiles to
    stay below it. Restarts pods."""
