"""What the scheduler wants done. A driver carries actions out in order and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flowprefill.request import Kind

Outcome = Literal["completed", "failed", "rejected", "shed", "cancelled"]
Granularity = Literal["operator", "layer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskItem:
    """One request's share of a task: tokens `[start, start + num_tokens)` of its prompt.

    KV of tokens before `start` is in place (cached prefix, or an earlier chunk). `block_ids` are the
    request's blocks in order, enough for `start + num_tokens` tokens. `completes` says that this task
    reaches the prompt's last token.
    """

    request_id: str
    start: int
    num_tokens: int
    block_ids: tuple[int, ...]
    completes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A submitted batch. `predicted_s` is the predicted engine time of the batch as packed."""

    task_id: int
    items: tuple[TaskItem, ...]
    predicted_s: float
    granularity: Granularity = "operator"
    kind: Kind = "prefill"

    def __post_init__(self) -> None:
        assert self.items, "a task has at least one item"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Start this task; it gets the baton at once."""

    task: Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt:
    """Ask the running task to stop at its next preemption point and to answer `Parked` with `ticket`."""

    task_id: int
    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawPreempt:
    """Take the pause request back. The task may have parked already: `Parked` then still comes."""

    task_id: int
    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Give the baton back to a parked task."""

    task_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Unwind this task (running or parked) at its next point; `Failed(error=None)` answers.

    A task that reaches its end first answers `Completed` instead. A parked task unwinds without the baton
    ever passing to model code.
    """

    task_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The request's one and only outcome.

    `reason` is for people and is empty for `completed`. A `completed` request keeps its blocks until
    `CapacityFreed` names it.
    """

    request_id: str
    outcome: Outcome
    reason: str = ""


Action = Submit | Preempt | WithdrawPreempt | Resume | Cancel | Finish
