"""Slots for suspended tasks in overload. A prompt of n tokens takes n milliseconds."""

from __future__ import annotations

import random

from flowprefill.scheduling.actions import Cancel, Preempt
from flowprefill.scheduling.events import Arrival, Failed, Parked, Progress
from flowprefill.scheduling.scheduler import Scheduler
from flowprefill.scheduling.settings import Ageing
from support.scheduling import VirtualEngine, request, scheduler

NEARLY_DONE = Progress(task_id=2, work_done=0.99, executed_s=2.97)
URGENT = request("urgent", 100, arrival=8.8, slo=0.15)


def full(**settings: object) -> Scheduler:
    """One slot, taken by `parked` (needs 1 s, due at 9.5); `running` (30 ms left at 8.8, due at 9) has the baton."""
    s = scheduler(max_suspended=1, **settings)
    s.handle(Arrival(requests=(request("parked", 1000, slo=9.5),)), 0.0)
    s.handle(Arrival(requests=(request("running", 3000, slo=9.0),)), 0.1)
    s.handle(Parked(task_id=1, ticket=1), 0.1)
    return s


def test_parked_work_that_can_be_met_keeps_its_slot() -> None:
    s = full()
    assert s.handle(Arrival(requests=(request("u", 100, arrival=0.2, slo=0.5),)), 0.2) == ()


def test_parked_work_whose_deadline_is_lost_makes_room_and_waits_again() -> None:
    s = full()
    assert s.handle(Arrival(requests=(URGENT,), progress=NEARLY_DONE), 8.8) == (Cancel(task_id=1),)
    (pause,) = s.handle(Failed(task_id=1, error=None, progress=NEARLY_DONE), 8.801)
    assert isinstance(pause, Preempt)
    snapshot = s.snapshot(8.801)
    assert (snapshot.waiting, snapshot.counters.recomputes) == (2, 1)


def test_the_one_with_the_least_work_done_makes_room() -> None:
    s = scheduler(max_suspended=2)
    s.handle(Arrival(requests=(request("much", 1000, slo=9.6),)), 0.0)
    much = Progress(task_id=1, work_done=0.3, executed_s=0.3)
    s.handle(Arrival(requests=(request("little", 1000, slo=9.5),), progress=much), 0.3)
    s.handle(Parked(task_id=1, ticket=1, progress=much), 0.3)
    little = Progress(task_id=2, work_done=0.1, executed_s=0.1)
    s.handle(Arrival(requests=(request("running", 3000, slo=9.45),), progress=little), 0.4)
    s.handle(Parked(task_id=2, ticket=2, progress=little), 0.4)
    urgent = request("urgent", 100, arrival=9.2, slo=0.2)
    done = Progress(task_id=3, work_done=0.99, executed_s=2.97)
    assert s.handle(Arrival(requests=(urgent,), progress=done), 9.2) == (Cancel(task_id=2),)


def test_it_makes_no_room_for_what_is_lost_itself() -> None:
    lost = request("urgent", 500, arrival=8.8, slo=0.15)
    assert full().handle(Arrival(requests=(lost,), progress=NEARLY_DONE), 8.8) == ()


def test_it_makes_no_room_when_the_setting_says_so() -> None:
    s = full(recompute_suspended=False)
    assert s.handle(Arrival(requests=(URGENT,), progress=NEARLY_DONE), 8.8) == ()


def test_it_makes_no_room_for_a_request_without_blocks() -> None:
    s = full(blocks=63 + 188 + 6)  # the urgent one needs 7
    assert s.handle(Arrival(requests=(URGENT,), progress=NEARLY_DONE), 8.8) == ()


def test_the_oldest_aged_task_keeps_its_slot_so_that_it_gets_to_its_end() -> None:
    s = full(ageing=Ageing(factor=0.5))  # it ages at 4.75
    assert Cancel(task_id=1) not in s.handle(Arrival(requests=(URGENT,), progress=NEARLY_DONE), 8.8)


def test_a_lost_request_pauses_nobody() -> None:
    """By the paper's formula the later of two lost deadlines goes first; a pause for it would gain nothing."""
    s = scheduler()
    s.handle(Arrival(requests=(request("lost", 3000, slo=1.0),)), 0.0)
    assert s.handle(Arrival(requests=(request("also lost", 3000, slo=2.0),)), 0.0) == ()
    assert isinstance(s.handle(Arrival(requests=(request("fits", 100, slo=5.0),)), 0.0)[0], Preempt)


def test_the_limit_on_suspended_tasks_costs_no_attainment_in_overload() -> None:
    """Half again as much work as the engine can do. With slots clogged by lost work every second deadline went."""

    def met(max_suspended: int) -> int:
        rng = random.Random(11)
        engine = VirtualEngine(
            scheduler(
                max_suspended=max_suspended,
                coefficients=(0.0202, 52.4e-6, 3.02e-9, 6.04e-9),
                blocks=1_000_000,
            ),
            ack_s=0.004,
        )
        deadlines = {}
        time_s = 0.0
        for index in range(500):
            time_s += rng.expovariate(12.0)
            short = rng.random() < 0.75
            tokens = rng.randint(64, 1200) if short else rng.randint(2000, 9000)
            item = request(f"r{index:03}", tokens, arrival=time_s, slo=0.25 if short else 4.0)
            deadlines[item.request_id] = item.deadline_s
            engine.arrive(item)
        engine.run()
        assert {how for how, _ in engine.outcomes.values()} == {"completed"}
        return sum(end <= deadlines[name] for name, (_, end) in engine.outcomes.items())

    assert met(2) >= 0.97 * met(500)
