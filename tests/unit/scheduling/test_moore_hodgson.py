"""The largest feasible set, against trying every subset."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from flowprefill.scheduling.moore_hodgson import largest_feasible_set
from flowprefill.scheduling.state import Job

NOW = 10.0


def job(name: int, remaining: float, deadline: float, weight: float = 1.0) -> Job:
    return Job(
        job_id=f"j{name}",
        sequence=name,
        arrival_s=0.0,
        deadline_s=deadline,
        remaining_s=remaining,
        weight=weight,
    )


def all_meet(jobs: tuple[Job, ...]) -> bool:
    """Whether running the jobs one after the other by deadline from NOW makes all of them in time."""
    end = NOW
    for one in sorted(jobs, key=lambda j: j.deadline_s):
        end += one.remaining_s
        if end >= one.deadline_s:
            return False
    return True


def largest_by_trying_all(jobs: list[Job]) -> int:
    return max(
        size for size in range(len(jobs) + 1) if any(all_meet(subset) for subset in combinations(jobs, size))
    )


# Multiples of 1/8 below 8: sums are exact, so that equality with a deadline is equality.
eighths = st.integers(1, 60).map(lambda n: n / 8)


@given(st.lists(st.tuples(eighths, eighths), max_size=9))
@settings(max_examples=300, deadline=None)
def test_no_feasible_set_is_larger(pairs: list[tuple[float, float]]) -> None:
    jobs = [job(i, remaining, NOW + due) for i, (remaining, due) in enumerate(pairs)]
    kept = largest_feasible_set(jobs, NOW)
    assert all_meet(tuple(j for j in jobs if j.job_id in kept))
    assert len(kept) == largest_by_trying_all(jobs)


@given(st.lists(st.tuples(eighths, eighths, st.sampled_from((1.0, 2.0, 5.0))), max_size=8))
@settings(max_examples=200, deadline=None)
def test_with_weights_the_set_is_still_feasible(triples: list[tuple[float, float, float]]) -> None:
    jobs = [job(i, remaining, NOW + due, weight) for i, (remaining, due, weight) in enumerate(triples)]
    kept = largest_feasible_set(jobs, NOW)
    assert all_meet(tuple(j for j in jobs if j.job_id in kept))


def test_a_long_job_gives_way_to_two_short_ones_unless_it_weighs_more() -> None:
    shorts = [job(1, 2.0, NOW + 3.0), job(2, 2.0, NOW + 6.0)]
    assert largest_feasible_set([job(0, 5.0, NOW + 6.0), *shorts], NOW) == {"j1", "j2"}
    assert largest_feasible_set([job(0, 5.0, NOW + 6.0, weight=10.0), *shorts], NOW) == {"j0"}


def test_a_job_that_is_lost_on_its_own_keeps_nobody_out() -> None:
    assert largest_feasible_set([job(0, 5.0, NOW + 1.0), job(1, 1.0, NOW + 1.5)], NOW) == {"j1"}
