"""How prefill work is ordered, batched and preempted."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from flowprefill_crd.base import ApiObject, DnsSubdomain
from flowprefill_crd.rules import Rule

Policy = Literal["fcfs", "edf", "d-edf", "s-edf", "srpt", "moore-hodgson"]
Preemption = Literal["operator", "layer", "chunk", "none"]


class Ageing(ApiObject):
    """Service for requests that are very late already, so that none waits for ever."""

    enabled: bool = True
    """Give late requests a share of the service; false reproduces the plain policy. Applied live."""

    factor: Annotated[int, Field(ge=1, le=1000)] = 4
    """A request is late once it has waited this many times its target. Applied live."""

    share_percent: Annotated[int, Field(ge=1, le=50)] = 5
    """Least share of the prefill time, in percent, that late requests get together, the oldest first.
    Applied live."""


class Predictor(ApiObject):
    """The prediction of prefill times, which slack and batches are computed from."""

    rules: ClassVar = (
        Rule(
            message="profilingJob measures what profileConfigMap holds already; set one of them",
            cel="!(self.profilingJob && has(self.profileConfigMap))",
            holds=lambda p: not p.profiling_job or p.profile_config_map is None,
            field="profilingJob",
        ),
    )

    online_correction: bool = True
    """Correct the prediction by the prefills completed so far. Applied live."""

    profile_config_map: DnsSubdomain | None = None
    """ConfigMap with a profile under the key profile.json; without it and without profilingJob each pod measures
    its own. Restarts pods."""

    profiling_job: bool = False
    """Measure prefill times once, in a Job with the prefill pods' image and resources; prefill pods start with its
    result. Measured again when the model, the engine, the image or these resources change. Not with engine vllm
    (condition ProfilingJobUnsupported). Restarts pods."""

    warmup: bool = True
    """Measure prefill times at the start of a pod before it is ready. Restarts pods."""

    @property
    def has_profile(self) -> bool:
        """Whether pods start from a profile that is measured before them."""
        return self.profiling_job or self.profile_config_map is not None


class Scheduling(ApiObject):
    """The scheduler of prefill pods."""

    rules: ClassVar = (
        Rule(
            message="preemption chunk needs chunkTokens; use an integer from 64 to 131072",
            cel="self.preemption != 'chunk' || has(self.chunkTokens)",
            holds=lambda s: s.preemption != "chunk" or s.chunk_tokens is not None,
            field="chunkTokens",
        ),
    )

    policy: Policy = "s-edf"
    """Order of the waiting requests: fcfs (arrival), edf (deadline), d-edf (deadline, behind the others once
    it has passed), s-edf (deadline, behind the others once it can no longer be met), srpt (shortest
    remaining time) or moore-hodgson (the most requests that can still meet their deadlines). Applied live."""

    batch_token_budget: Annotated[int, Field(ge=16, le=131_072)] = 2048
    """Most new prompt tokens that requests are batched up to; a longer prompt runs alone. Applied live."""

    preemption: Preemption = "operator"
    """Where a running prefill may stop for a more urgent one: at the next operator, at the next layer, at
    the end of a chunk of chunkTokens, or nowhere. Applied live."""

    chunk_tokens: Annotated[int, Field(ge=64, le=131_072)] | None = None
    """Most prompt tokens in one forward pass; a longer prompt is prefilled in several. Prompts are not cut
    when absent. Needed when preemption is chunk. Applied live."""

    max_suspended: Annotated[int, Field(ge=0, le=64)] = 8
    """Most suspended prefills that a pod keeps; 0 forbids preemption. Applied live."""

    recompute_suspended_under_pressure: bool = True
    """When an urgent request lacks KV cache, drop the suspended prefill with the latest deadline and
    compute it again later. Applied live."""

    queue_limit: Annotated[int, Field(ge=1, le=1_000_000)] = 4096
    """Most waiting requests in one prefill pod; further ones are rejected (429). Applied live."""

    ageing: Ageing = Ageing()
    """Service for requests that are very late already. Applied live."""

    predictor: Predictor = Predictor()
    """The prediction of prefill times. Each field says whether it restarts pods."""
