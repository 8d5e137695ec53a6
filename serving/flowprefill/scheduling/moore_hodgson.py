"""The largest set of jobs that can all meet their deadlines on one machine (Moore and Hodgson, 1968)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from flowprefill.scheduling.state import Job, slack_s


def largest_feasible_set(jobs: Sequence[Job], now_s: float) -> set[str]:
    """Ids of a set that meets every deadline when run in deadline order from now.

    Jobs enter by deadline; whenever one would be late, the job with the most remaining time per weight leaves. With
    equal weights no feasible set is larger; with different ones the problem is NP-hard and this is a heuristic for
    the greatest total weight. A deadline is met when slack stays above zero, as in s-edf.
    """
    end_s = now_s
    heap: list[tuple[float, str, float]] = []  # (-remaining / weight, id, remaining)
    kept: set[str] = set()
    for job in sorted(jobs, key=lambda job: (job.deadline_s, job.job_id)):
        if slack_s(job.deadline_s, now_s, job.remaining_s) <= 0.0:
            continue  # lost even when run at once
        heapq.heappush(heap, (-job.remaining_s / job.weight, job.job_id, job.remaining_s))
        kept.add(job.job_id)
        end_s += job.remaining_s
        while end_s >= job.deadline_s and heap:
            _, dropped, left_s = heapq.heappop(heap)
            kept.discard(dropped)
            end_s -= left_s
    return kept
