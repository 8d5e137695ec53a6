"""The largest set of jobs that can all meet their deadlines on one machine (Moore and Hodgson, 1968)."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from flowprefill.scheduling.state import Job


def largest_feasible_set(jobs: Sequence[Job], now_s: float) -> set[str]:
    """Ids of a set that meets every deadline when run in deadline order from now; see `feasible_set`."""
    by_deadline = sorted((job.deadline_s, job.job_id, job.remaining_s, job.weight) for job in jobs)
    return feasible_set(by_deadline, now_s)


def feasible_set(jobs: Iterable[tuple[float, str, float, float]], now_s: float) -> set[str]:
    """The same over sorted (deadline, id, remaining, weight).

    Jobs enter by deadline; whenever one would be late, the job with the most remaining time per weight leaves. With
    equal weights no feasible set is larger; with different ones the problem is NP-hard and this is a heuristic for
    the greatest total weight. A deadline is met when slack stays above zero, as in s-edf.
    """
    end_s = now_s
    heap: list[tuple[float, str, float]] = []  # (-remaining / weight, id, remaining)
    kept: set[str] = set()
    for deadline_s, job_id, remaining_s, weight in jobs:
        if deadline_s - now_s - remaining_s <= 0.0:
            continue  # lost even when run at once
        heapq.heappush(heap, (-remaining_s / weight, job_id, remaining_s))
        kept.add(job_id)
        end_s += remaining_s
        while end_s >= deadline_s and heap:
            _, dropped, left_s = heapq.heappop(heap)
            kept.discard(dropped)
            end_s -= left_s
    return kept
