"""The scheduler's settings, as values. The CR's live document becomes one of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PolicyName = Literal["fcfs", "edf", "d-edf", "s-edf", "srpt", "moore-hodgson"]
Preemption = Literal["operator", "layer", "chunk", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ageing:
    """A request later than `factor` times its SLO gets at least `share` of service, oldest first.

    The share is paid out in turns of about `quantum_s` seconds.
    """

    factor: float = 4.0
    share: float = 0.05
    quantum_s: float = 0.05

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise ValueError(f"factor is {self.factor}; accepted are positive multiples of the SLO")
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}; accepted are fractions of service in (0, 1]")
        if not self.quantum_s > 0:
            raise ValueError(f"quantum_s is {self.quantum_s}; accepted are positive numbers of seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """What a user tunes. `preemption` and `chunk_tokens` are independent (DESIGN: batching).

    `batch_token_budget` counts new tokens, net of cached prefix. `ageing=None` reproduces the paper.
    `recompute_suspended` allows dropping the suspended task with the latest deadline when an urgent request
    lacks KV, and a suspended one whose deadline is lost when it lacks a slot. `queue_limit` bounds waiting requests. `guard_deadlines=False` fills batches up to the budget in
    policy order whatever that does to deadlines, as systems without SLO-aware batching do.
    """

    policy: PolicyName = "s-edf"
    preemption: Preemption = "operator"
    batch_token_budget: int = 2048
    chunk_tokens: int | None = None
    max_suspended: int = 8
    recompute_suspended: bool = True
    ageing: Ageing | None = Ageing()
    queue_limit: int = 4096
    online_correction: bool = True
    guard_deadlines: bool = True

    def __post_init__(self) -> None:
        if self.preemption == "chunk" and self.chunk_tokens is None:
            raise ValueError("preemption 'chunk' needs chunk_tokens; give the tokens one forward may take")
        if self.batch_token_budget < 1:
            raise ValueError(f"batch_token_budget is {self.batch_token_budget}; accepted are integers from 1")
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {self.chunk_tokens}; accepted are integers from 1, or none")
        if self.max_suspended < 0:
            raise ValueError(f"max_suspended is {self.max_suspended}; accepted are integers from 0")
        if self.queue_limit < 1:
            raise ValueError(f"queue_limit is {self.queue_limit}; accepted are integers from 1")
