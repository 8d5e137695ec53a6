"""Scheduling policies: in which order the jobs known now should run.

A policy is one function from jobs and the time to ranks; the smaller rank runs first. Ranks of equal value fall back
on the job's id, so that no order is left to chance. To add one: write the function, enter it in `POLICIES` with the
structure that keeps waiting requests in its order, and name it in `settings.PolicyName`. One contract suite compares
every structure with its function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowprefill.scheduling.moore_hodgson import largest_feasible_set
from flowprefill.scheduling.ordering import (
    DeadlinePassedOrder,
    FeasibleSetOrder,
    Order,
    Rank,
    SlackOrder,
    StaticOrder,
)
from flowprefill.scheduling.settings import PolicyName
from flowprefill.scheduling.state import Job, slack_s


def fcfs(job: Job, now_s: float) -> Rank:
    """First come, first served; a burst in the order it came in."""
    return (0, job.arrival_s, job.sequence, job.job_id)


def edf(job: Job, now_s: float) -> Rank:
    """Earliest deadline first."""
    return (0, job.deadline_s, 0, job.job_id)


def d_edf(job: Job, now_s: float) -> Rank:
    """Earliest deadline first; behind everything else once the deadline has passed."""
    return (0 if job.deadline_s > now_s else 1, job.deadline_s, 0, job.job_id)


def s_edf(job: Job, now_s: float) -> Rank:
    """Earliest deadline among those that can be met, then the latest among those that cannot.

    The order of the paper's priority, (+1 if slack > 0 else -1) / deadline, larger first.
    """
    if slack_s(job.deadline_s, now_s, job.remaining_s) > 0.0:
        return (0, job.deadline_s, 0, job.job_id)
    return (1, -job.deadline_s, 0, job.job_id)


def srpt(job: Job, now_s: float) -> Rank:
    """Shortest remaining time first, time divided by weight."""
    return (0, job.remaining_s / job.weight, 0, job.job_id)


def moore_hodgson(jobs: Sequence[Job], now_s: float) -> list[Rank]:
    """The largest set that can meet its deadlines in earliest-deadline order, then the rest as s-edf."""
    kept = largest_feasible_set(jobs, now_s)
    ranks = []
    for job in jobs:
        tier, *rest = s_edf(job, now_s)
        ranks.append((0 if job.job_id in kept else 2 + tier, *rest))
    return ranks  # type: ignore[return-value]  # the star hides the length


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy's function and the structure that keeps waiting requests in its order.

    `lost_tier` is the tier from which on a job's deadline counts as lost; None when the policy does not tell.
    `late_at_deadline` says that a job's rank changes the moment its deadline passes, so that a running one must be
    looked at again then.
    """

    name: PolicyName
    ranks: Callable[[Sequence[Job], float], Sequence[Rank]]
    make_order: Callable[[], Order]
    lost_tier: int | None = None
    late_at_deadline: bool = False

    def lost(self, rank: Rank) -> bool:
        """Whether the policy has given up the deadline of a job with this rank."""
        return self.lost_tier is not None and rank[0] >= self.lost_tier


def _each(rank: Callable[[Job, float], Rank]) -> Callable[[Sequence[Job], float], Sequence[Rank]]:
    return lambda jobs, now_s: [rank(job, now_s) for job in jobs]


POLICIES: dict[PolicyName, Policy] = {
    policy.name: policy
    for policy in (
        Policy(name="fcfs", ranks=_each(fcfs), make_order=lambda: StaticOrder(fcfs)),
        Policy(name="edf", ranks=_each(edf), make_order=lambda: StaticOrder(edf)),
        Policy(
            name="d-edf",
            ranks=_each(d_edf),
            make_order=lambda: DeadlinePassedOrder(d_edf),
            lost_tier=1,
            late_at_deadline=True,
        ),
        Policy(name="s-edf", ranks=_each(s_edf), make_order=lambda: SlackOrder(s_edf), lost_tier=1),
        Policy(name="srpt", ranks=_each(srpt), make_order=lambda: StaticOrder(srpt)),
        Policy(
            name="moore-hodgson",
            ranks=moore_hodgson,
            make_order=lambda: FeasibleSetOrder(s_edf),
            lost_tier=3,
        ),
    )
}
