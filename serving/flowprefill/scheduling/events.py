"""What can happen to the scheduler. Time comes beside an event, never inside its handling.

Every event may carry the running task's `Progress`, so that remaining time is counted from work done and
not from wall time since the start (DESIGN: TTFT predictor).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flowprefill.request import Request
from flowprefill.scheduling.settings import SchedulerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far one task has come.

    `work_done` is the fraction of the task's predicted work behind the last preemption point it passed, in
    [0, 1]; `executed_s` is the time it held the baton so far, in seconds.
    """

    task_id: int
    work_done: float
    executed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Requests that arrived together (a burst is one event), in order of arrival."""

    requests: tuple[Request, ...]
    progress: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """The task stands at a preemption point in answer to `Preempt(task_id, ticket)`."""

    task_id: int
    ticket: int
    progress: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The task ran to its end. `executed_s` is its time with the baton, parked time excluded."""

    task_id: int
    executed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The engine raised in this task, or a cancelled task has been unwound (`error` is None then).

    Nothing of the task runs any more: its blocks may be reused.
    """

    task_id: int
    error: str | None
    executed_s: float = 0.0
    progress: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """Nobody waits for this request any more. Unknown and finished ids are ignored."""

    request_id: str
    progress: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityFreed:
    """KV of these finished requests was pulled, expired or given up: their blocks return to the pool."""

    request_ids: tuple[str, ...]
    progress: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The moment named by `Scheduler.next_tick_s` has come (a slack expiry or an ageing bound)."""

    progress: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconfigured:
    """The live settings changed."""

    settings: SchedulerSettings = field()
    progress: Progress | None = None


Event = Arrival | Parked | Completed | Failed | Cancelled | CapacityFreed | Tick | Reconfigured
