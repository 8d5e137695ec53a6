"""Aged requests get their share: at least 5 % of service, oldest first, and little more while others are urgent."""

from __future__ import annotations

import random

import pytest

from flowprefill.scheduling.actions import Submit
from flowprefill.scheduling.events import Arrival, Cancelled, Progress, Tick
from flowprefill.scheduling.settings import Ageing
from support.scheduling import VirtualEngine, request, scheduler

AGEING = Ageing(factor=4.0, share=0.05, quantum_s=0.05)


def overload(ageing: Ageing | None, *, preemption: str = "operator", **fields: object) -> VirtualEngine:
    """An endless stream of urgent prompts that fills the engine, and two old ones that can never be in time.

    1.5 s of work arrives every second for 40 s. Both old ones age at 0.4 s; `second` came later.
    """
    engine = VirtualEngine(
        scheduler(ageing=ageing, preemption=preemption, batch_token_budget=100, **fields), ack_s=0.001
    )
    rng = random.Random(4)
    engine.arrive(
        request("first", 1000, slo=0.1, arrival=0.0),
        request("second", 400, slo=0.1, arrival=0.001, deadline_s=0.2),
    )
    for index in range(600):
        engine.arrive(
            request(f"u{index}", 100, arrival=index / 15 + rng.random() * 0.01, slo=0.5 + rng.random())
        )
    return engine


def test_without_ageing_the_hopeless_wait_until_the_stream_ends() -> None:
    engine = overload(None)
    engine.run()
    assert engine.outcomes["first"][1] > 40.0


@pytest.mark.parametrize("preemption", ["operator", "none"])
def test_with_ageing_they_get_at_least_their_share_oldest_first(preemption: str) -> None:
    engine = overload(AGEING, preemption=preemption)
    engine.run()
    first, second = engine.outcomes["first"][1], engine.outcomes["second"][1]
    assert first < second, "oldest first"
    # 1.0 s of work at 5 % of service from 0.4 s on takes at most 20 s; one quantum is up to 1 s late in coming.
    assert first < 0.4 + 1.0 / 0.05 + 1.0
    assert second < 0.4 + 1.4 / 0.05 + 1.0


def test_they_get_little_more_than_their_share_while_others_are_urgent() -> None:
    engine = overload(AGEING)
    engine.run()
    assert engine.outcomes["first"][1] > 0.8 * (0.4 + 1.0 / 0.05)


def test_a_tick_is_armed_for_the_ageing_bound_and_then_for_the_turn() -> None:
    s = scheduler(ageing=AGEING)
    s.handle(Arrival(requests=(request("running", 60_000, slo=100.0),)), 0.0)
    s.handle(Arrival(requests=(request("old", 100, slo=1.0, deadline_s=0.05),)), 0.0)
    assert s.next_tick_s == 4.0
    progress = Progress(task_id=1, work_done=4 / 60, executed_s=4.0)
    s.handle(Arrival(requests=(request("other", 100, arrival=4.0, slo=200.0),), progress=progress), 4.0)
    # From here it is owed 5 %: a quantum of 50 ms is owed after a second.
    assert s.next_tick_s == pytest.approx(5.0)


def test_nothing_is_owed_any_more_once_no_aged_work_is_left() -> None:
    s = scheduler(ageing=AGEING)
    s.handle(Arrival(requests=(request("running", 60_000, slo=100.0),)), 0.0)
    s.handle(Arrival(requests=(request("old", 100, slo=1.0, deadline_s=0.05),)), 0.0)
    s.handle(Tick(progress=Progress(task_id=1, work_done=4 / 60, executed_s=4.0)), 4.0)
    nearly = Progress(task_id=1, work_done=4.9 / 60, executed_s=4.9)
    s.handle(Cancelled(request_id="old", progress=nearly), 4.9)
    s.handle(Arrival(requests=(request("next", 100, arrival=4.9, slo=1.0, deadline_s=4.95),)), 4.9)
    assert s.next_tick_s == pytest.approx(8.9)
    s.handle(Tick(progress=Progress(task_id=1, work_done=8.9 / 60, executed_s=8.9)), 8.9)
    assert s.next_tick_s == pytest.approx(9.9), "a whole quantum from here, not what the first had nearly got"


def test_no_tick_for_ageing_without_preemption() -> None:
    s = scheduler(ageing=AGEING, preemption="none")
    s.handle(Arrival(requests=(request("a", 1000, slo=9.0), request("b", 5000, slo=0.1))), 0.0)
    assert s.next_tick_s is None


def test_blocks_gather_for_an_aged_request_though_small_ones_would_fit() -> None:
    """The old one needs the whole pool. Small ones overlap so that without ageing it is never free at one time."""

    def run(ageing: Ageing | None) -> tuple[float, float]:
        engine = VirtualEngine(
            scheduler(
                ageing=ageing, blocks=20, preemption="none", batch_token_budget=16, recompute_suspended=False
            ),
            hold_s=0.02,
        )
        engine.arrive(request("small", 16, slo=0.05), request("big", 320, arrival=0.001, slo=0.05))
        for index in range(2000):
            engine.arrive(request(f"u{index}", 16, arrival=index * 0.017, slo=0.5))
        engine.run()
        return engine.outcomes["big"][1], max(end for _, end in engine.outcomes.values())

    starved, _ = run(None)
    served, _ = run(AGEING)
    assert starved > 34.0
    assert served < 5.0


def test_blocks_that_do_not_come_stop_the_small_ones_no_longer_than_a_turn() -> None:
    """Nineteen of twenty blocks are never pulled, and the old request needs them all. It must not close the pod."""
    engine = VirtualEngine(
        scheduler(ageing=AGEING, blocks=20, preemption="none", batch_token_budget=16), hold_s=0.0
    )
    engine.scheduler.kv.allocate("stuck elsewhere", 19 * 16)
    engine.arrive(request("big", 320, slo=0.05))
    small = [request(f"u{index}", 16, arrival=index * 0.1, slo=0.2) for index in range(100)]
    engine.arrive(*small)
    engine.run(until_s=20.0)
    assert "big" not in engine.outcomes
    for item in small:
        outcome, end = engine.outcomes[item.request_id]
        assert outcome == "completed"
        assert end <= item.deadline_s


def test_ageing_never_runs_two_tasks_or_loses_a_request() -> None:
    engine = overload(AGEING)
    engine.run()
    assert len(engine.outcomes) == 602
    assert {outcome for outcome, _ in engine.outcomes.values()} == {"completed"}
    recomputes = engine.scheduler.snapshot(engine.now_s).counters.recomputes
    assert len(engine.actions(Submit)) <= 602 + recomputes
