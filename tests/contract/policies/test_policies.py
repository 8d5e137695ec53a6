"""One suite over every policy: its structure gives at all times the order that its function asks for.

The expected order is a direct sort by the policy's own function, and for each policy a sort written here from its
definition.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowprefill.scheduling.actions import Preempt, Resume, Submit
from flowprefill.scheduling.events import Arrival, Cancelled, Completed, Event, Parked
from flowprefill.scheduling.moore_hodgson import largest_feasible_set
from flowprefill.scheduling.ordering import FEASIBLE_SET_WINDOW
from flowprefill.scheduling.policy import POLICIES
from flowprefill.scheduling.settings import PolicyName
from flowprefill.scheduling.state import Job, WaitingRequest
from flowprefill.scheduling.waiting import MAX_CANDIDATES
from support.scheduling import VirtualEngine, request, scheduler

NAMES: tuple[PolicyName, ...] = get_args(PolicyName)


def papers_priority(job: Job, now_s: float) -> float:
    """The formula as the paper's code has it."""
    remaining = max(job.remaining_s, 0)
    slack = job.deadline_s - now_s - remaining
    return (1 if slack > 0 else -1) / job.deadline_s


def moore_hodgson_order(jobs: Sequence[Job], now_s: float) -> list[Job]:
    kept = largest_feasible_set(jobs, now_s)
    first = sorted((j for j in jobs if j.job_id in kept), key=lambda j: (j.deadline_s, j.job_id))
    rest = [j for j in jobs if j.job_id not in kept]
    return first + sorted(rest, key=lambda j: (-papers_priority(j, now_s), j.job_id))


BY_DEFINITION: dict[PolicyName, Callable[[Sequence[Job], float], list[Job]]] = {
    "fcfs": lambda jobs, now: sorted(jobs, key=lambda j: (j.arrival_s, j.sequence)),
    "edf": lambda jobs, now: sorted(jobs, key=lambda j: (j.deadline_s, j.job_id)),
    "d-edf": lambda jobs, now: sorted(jobs, key=lambda j: (j.deadline_s <= now, j.deadline_s, j.job_id)),
    "s-edf": lambda jobs, now: sorted(jobs, key=lambda j: (-papers_priority(j, now), j.job_id)),
    "srpt": lambda jobs, now: sorted(jobs, key=lambda j: (j.remaining_s / j.weight, j.job_id)),
    "moore-hodgson": moore_hodgson_order,
}


def waiting(index: int, rng: random.Random) -> WaitingRequest:
    """Times on a coarse grid, so that ties and exact slack of zero are common."""
    arrival = rng.randrange(0, 40) * 0.25
    return WaitingRequest(
        request=request(
            f"r{index:03}",
            arrival=arrival,
            deadline_s=arrival + rng.randrange(1, 60) * 0.25,
            weight=rng.choice((1.0, 1.0, 2.0)),
        ),
        sequence=index,
        base_s=rng.randrange(1, 20) * 0.25,
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_value_is_a_policy(name: PolicyName) -> None:
    assert POLICIES[name].name == name
    assert set(POLICIES) == set(NAMES) == set(BY_DEFINITION)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_the_structure_keeps_the_functions_order_while_requests_come_and_go_and_scale_and_time_move(
    name: PolicyName, seed: int
) -> None:
    rng = random.Random(seed)
    policy = POLICIES[name]
    order = policy.make_order()
    held: dict[str, WaitingRequest] = {}
    now_s = 1.0
    for step in range(60):
        if held and rng.random() < 0.4:
            gone = held.pop(rng.choice(sorted(held)))
            order.remove(gone)
        else:
            new = waiting(step, rng)
            held[new.request_id] = new
            order.add(new)
        now_s += rng.choice((0.0, 0.0, 0.25, 0.5))
        scale = rng.choice((0.5, 1.0, 1.0, 2.0))
        jobs = [w.job(scale) for w in held.values()]
        assert len(jobs) <= FEASIBLE_SET_WINDOW
        listed = [w.request_id for _, w in order.view(now_s, scale, ())]
        ranks = dict(zip([j.job_id for j in jobs], policy.ranks(jobs, now_s), strict=True))
        assert listed == sorted(ranks, key=ranks.__getitem__)
        assert listed == [job.job_id for job in BY_DEFINITION[name](jobs, now_s)]


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_a_task_is_ranked_among_the_waiting_as_if_it_waited(name: PolicyName, seed: int) -> None:
    rng = random.Random(seed)
    policy = POLICIES[name]
    order = policy.make_order()
    everyone = [waiting(index, rng) for index in range(20)]
    tasks, rest = everyone[:4], everyone[4:]
    for item in rest:
        order.add(item)
    task_jobs = [item.job(1.5) for item in tasks]
    view = order.view(2.0, 1.5, task_jobs)
    merged = sorted(
        [(rank, item.request_id) for rank, item in view] + [(view.rank(job), job.job_id) for job in task_jobs]
    )
    expected = BY_DEFINITION[name]([item.job(1.5) for item in everyone], 2.0)
    assert [job_id for _, job_id in merged] == [job.job_id for job in expected]


@pytest.mark.parametrize("name", NAMES)
def test_ranks_fall_nowhere_along_the_order_with_thousands_waiting(name: PolicyName) -> None:
    """Also beyond the window of moore-hodgson, where the function over all jobs is not the reference."""
    rng = random.Random(5)
    order = POLICIES[name].make_order()
    for index in range(3000):
        order.add(waiting(index, rng))
    ranks = [rank for rank, _ in order.view(4.0, 1.0, ())]
    assert len(ranks) == 3000
    assert ranks == sorted(ranks)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("preemption", ["operator", "none"])
def test_every_request_ends_once_and_alone_requests_meet_what_they_can(
    name: PolicyName, preemption: str
) -> None:
    """A light load: one request at a time, ends before the next comes, whatever the policy."""
    engine = VirtualEngine(scheduler(policy=name, preemption=preemption))
    for index in range(5):
        engine.arrive(request(f"r{index}", 100, arrival=index * 1.0, slo=0.2))
    engine.run()
    assert engine.outcomes == {f"r{i}": ("completed", pytest.approx(i + 0.1)) for i in range(5)}


@pytest.mark.parametrize("name", NAMES)
def test_an_event_looks_at_a_bounded_number_of_requests_however_many_wait(
    name: PolicyName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: how many waiting requests are turned into jobs while events are handled."""
    looked_at = 0
    original = WaitingRequest.job

    def counting(self: WaitingRequest, scale: float) -> Job:
        nonlocal looked_at
        looked_at += 1
        return original(self, scale)

    def most_looked_at(num_waiting: int) -> int:
        nonlocal looked_at
        rng = random.Random(1)
        s = scheduler(policy=name, queue_limit=100_000, online_correction=True)
        requests = tuple(
            request(f"r{i}", rng.randrange(50, 3000), slo=rng.uniform(0.2, 60.0)) for i in range(num_waiting)
        )
        todo: list[Event] = [Arrival(requests=requests)]
        worst = now_s = 0.0
        for step in range(80):
            now_s += 0.05
            event = todo.pop() if todo else Cancelled(request_id=f"r{num_waiting // 2 + step}")
            looked_at = 0
            actions = s.handle(event, now_s)
            if step > 0:
                worst = max(worst, looked_at)
            for action in actions:
                match action:
                    case Submit(task=task):
                        todo.append(Completed(task_id=task.task_id, executed_s=1.1 * task.predicted_s))
                        todo.append(Arrival(requests=(request(f"n{step}", 40, arrival=now_s, slo=0.3),)))
                    case Preempt(task_id=task_id, ticket=ticket):
                        todo.append(Parked(task_id=task_id, ticket=ticket))
                    case Resume(task_id=task_id):
                        todo.append(Completed(task_id=task_id, executed_s=1.0))
        return int(worst)

    monkeypatch.setattr(WaitingRequest, "job", counting)
    few, many = most_looked_at(300), most_looked_at(3000)
    assert 0 < many <= 2 * MAX_CANDIDATES
    assert few > 0
