"""What the scheduler knows of a request. Token ids and sampling stay with the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One piece of work with a deadline: a prompt to prefill, or (colocated mode) one decode step.

    All times are seconds on the scheduler's clock. `prefix_hashes` holds one chained hash per *full*
    block of the prompt (`flowprefill.scheduling.kv.prefix_hashes`); two requests share a prefix of k blocks
    exactly when their first k hashes are equal. A decode step has kind `decode`, counts its sequences in
    `num_prompt_tokens`, is never batched with other work and owns no blocks of its own.
    """

    request_id: str
    num_prompt_tokens: int
    arrival_s: float
    deadline_s: float
    ttft_slo_s: float
    slo_class: str = "default"
    weight: float = 1.0
    shed_when_infeasible: bool = False
    prefix_hashes: tuple[int, ...] = ()
    kind: Kind = "prefill"

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 1:
            raise ValueError(f"num_prompt_tokens is {self.num_prompt_tokens}; a request has at least 1 token")
        if not self.ttft_slo_s > 0:
            raise ValueError(f"ttft_slo_s is {self.ttft_slo_s}; a target is a positive number of seconds")
        if not self.weight > 0:
            raise ValueError(f"weight is {self.weight}; accepted are positive numbers")
