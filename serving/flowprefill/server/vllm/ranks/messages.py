"""What the engine core and its ranks tell each other. Task ids and tickets are the scheduler's.

| message | from | to |
| --- | --- | --- |
| `Ready` | each rank, first | core |
| `Begin`, `Empty`, `Leave` | core | all ranks |
| `Preempt`, `WithdrawPreempt`, `Resume`, `Cancel` | core | leader |
| `Parked` | leader | core |
| `Standing` | followers | core, which tells the leader `Gathered` once all have said it |
| `LetGo` | leader | core, which passes it on to the followers |
| `Ended`, `Emptied`, `News`, `Lost` | each rank | core |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowprefill.scheduling.actions import Cancel, Granularity, Preempt, Resume, Task, WithdrawPreempt
from flowprefill.scheduling.events import Completed, Failed, Parked

if TYPE_CHECKING:
    from flowprefill.engines.vllm_engine.steps import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The rank can take steps."""

    rank: int
    num_slots: int
    num_points: Mapping[Granularity, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Run this step."""

    task: Task
    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """All followers stand at the agreed place."""

    task_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """This follower stands at the agreed place."""

    task_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LetGo:
    """The leader leaves the agreed place: the others go on as well, or unwind."""

    task_id: int
    unwind: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Empty:
    """Run this step without tokens, now."""

    output: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Emptied:
    """The empty step has run: the leader's result, and what this rank's KV connector said."""

    result: Any
    connector: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The step has ended on this rank. `result` is the leader's, None on others and of steps that did not complete."""

    event: Completed | Failed
    result: Any
    connector: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """This rank's KV connector has finished transfers while a step ran."""

    connector: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """This rank cannot go on, nor can the others."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """End; no step is under way."""


ToRank = Begin | Preempt | WithdrawPreempt | Resume | Cancel | Gathered | LetGo | Empty | Leave
FromRank = Ready | Parked | Standing | LetGo | Ended | Emptied | News | Lost
