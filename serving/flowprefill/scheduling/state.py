"""What the scheduler remembers of requests and tasks between events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flowprefill.request import Kind, Request
from flowprefill.scheduling.actions import Task, TaskItem
from flowprefill.scheduling.predictor import remaining_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a policy may look at: a waiting request, or a task with its members taken together.

    `remaining_s` is the predicted engine time it still needs. `sequence` is its order of arrival and `job_id` breaks
    ties. For a task, `deadline_s` is the earliest among its members that can still be met and `weight` their sum.
    """

    job_id: str
    sequence: int
    arrival_s: float
    deadline_s: float
    remaining_s: float
    weight: float = 1.0
    kind: Kind = "prefill"


@dataclass(slots=True, kw_only=True, eq=False)
class WaitingRequest:
    """An admitted request from arrival to outcome; while it waits, an order holds it.

    `base_s` is the profiled time it needs alone, given `num_cached` tokens of KV in place (cached prefix or
    earlier chunks), as last looked up at `cache_version`; `awaited_hash` is the first block that was missing then.
    `num_computed` counts tokens done by earlier chunks; KV is
    held exactly when it is above zero or the request is in a task. `recomputes` counts progress thrown away.
    """

    request: Request
    sequence: int
    base_s: float = 0.0
    num_cached: int = 0
    num_computed: int = 0
    cache_version: int = -1
    awaited_hash: int | None = None
    recomputes: int = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def started(self) -> bool:
        """Whether earlier chunks of it ran and their KV is held."""
        return self.num_computed > 0

    @property
    def num_new(self) -> int:
        """Tokens to compute, as last priced."""
        return self.request.num_prompt_tokens - self.num_cached

    def job(self, scale: float) -> Job:
        request = self.request
        return Job(
            job_id=request.request_id,
            sequence=self.sequence,
            arrival_s=request.arrival_s,
            deadline_s=request.deadline_s,
            remaining_s=scale * self.base_s,
            weight=request.weight,
            kind=request.kind,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """One request's part in a task. `live` until its outcome is known while the task goes on."""

    waiting: WaitingRequest
    item: TaskItem
    live: bool = True


@dataclass(slots=True, kw_only=True, eq=False)
class ActiveTask:
    """A submitted task until `Completed` or `Failed`.

    `ending` says that Cancel was sent: because nobody waits for it any more, or to free its KV and compute it again
    later. `open_tickets` are pauses asked for since it last got the baton; only they make a Parked believable.
    """

    task: Task
    members: tuple[Member, ...]
    base_s: float
    work_done: float = 0.0
    executed_s: float = 0.0
    ending: Literal["no", "cancel", "recompute"] = "no"
    open_tickets: set[int] = field(default_factory=set)

    @property
    def task_id(self) -> int:
        return self.task.task_id

    def live(self) -> list[Member]:
        return [member for member in self.members if member.live]

    def remaining_s(self, scale: float) -> float:
        return remaining_s(scale * self.base_s, self.work_done, self.executed_s)

    def job(self, now_s: float, scale: float) -> Job:
        """The task as one job: the earliest deadline that can still be met, or the latest when none can.

        The latest, because among lost deadlines the paper's formula puts the latest first.
        """
        left_s = self.remaining_s(scale)
        requests = [member.waiting.request for member in self.members if member.live] or [
            member.waiting.request for member in self.members
        ]
        feasible = [r.deadline_s for r in requests if slack_s(r.deadline_s, now_s, left_s) > 0.0]
        first = min(self.members, key=lambda member: member.waiting.sequence).waiting
        return Job(
            job_id=first.request_id,
            sequence=first.sequence,
            arrival_s=min(request.arrival_s for request in requests),
            deadline_s=min(feasible) if feasible else max(request.deadline_s for request in requests),
            remaining_s=left_s,
            weight=sum(request.weight for request in requests),
            kind=self.task.kind,
        )


def slack_s(deadline_s: float, now_s: float, remaining_s: float) -> float:
    """Time to spare if the work runs alone from now on; zero or less when the deadline is lost.

    Source: FlowPrefill, arXiv:2602.16603, slack-aware EDF.
    """
    return deadline_s - now_s - max(remaining_s, 0.0)
