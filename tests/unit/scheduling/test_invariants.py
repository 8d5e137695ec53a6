"""What holds in every run, over random scenarios with awkward timing.

The virtual engine asserts while it runs: one task at a time, nothing submitted twice, one outcome a request, tokens
never computed twice unless from the start. Here: nothing is lost, nothing is leaked, and runs repeat.
"""

from __future__ import annotations

import random
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from flowprefill.scheduling.actions import Cancel, Finish, Preempt, Resume, Submit, WithdrawPreempt
from flowprefill.scheduling.events import Arrival, Completed, Failed, Parked
from flowprefill.scheduling.kv import KVCachePool, prefix_hashes
from flowprefill.scheduling.predictor import Predictor
from flowprefill.scheduling.scheduler import Scheduler
from flowprefill.scheduling.settings import Ageing, PolicyName, Preemption, SchedulerSettings
from support.scheduling import VirtualEngine, request

BLOCKS, BLOCK_SIZE = 40, 4


def random_settings(rng: random.Random) -> SchedulerSettings:
    preemption: Preemption = rng.choice(("operator", "operator", "layer", "chunk", "none"))
    chunk = rng.choice((None, 8, 20))
    return SchedulerSettings(
        policy=rng.choice(get_args(PolicyName)),
        preemption=preemption if chunk is not None or preemption != "chunk" else "none",
        chunk_tokens=chunk,
        batch_token_budget=rng.choice((1, 16, 64)),
        max_suspended=rng.choice((0, 1, 3, 8)),
        recompute_suspended=rng.random() < 0.7,
        ageing=rng.choice((None, Ageing(factor=1.0, share=0.2, quantum_s=0.005))),
        queue_limit=rng.choice((3, 1000)),
        online_correction=rng.random() < 0.5,
        guard_deadlines=rng.random() < 0.8,
    )


def scenario(seed: int) -> VirtualEngine:
    """Bursts, shared prefixes, cancellations anywhere, failures, late mail, changes of settings; times on a grid
    of quarter milliseconds, so that many things happen at equal times."""
    rng = random.Random(seed)
    tick = 0.00025
    delays = rng.choice(((0.0,), (0.0, tick, 8 * tick), (20 * tick,)))
    s = Scheduler(
        random_settings(rng), KVCachePool(BLOCKS, BLOCK_SIZE), Predictor((0.001, 0.001, 1e-6, 2e-6))
    )
    failing = rng.choice((0.0, 0.0, 0.2))
    pace = rng.choice((1.0, 1.0, 1.6))
    engine = VirtualEngine(
        s,
        duration=lambda task: round(task.predicted_s * pace / tick) * tick,
        fails=lambda task: "engine error" if random.Random(seed + task.task_id).random() < failing else None,
        ack_s=rng.choice((0.0, tick, 12 * tick)),
        delivery_s=lambda: rng.choice(delays),
        hold_s=rng.choice((0.0, 40 * tick)),
    )
    time_s = 0.0
    for index in range(rng.randrange(5, 60)):
        burst = []
        for number in range(rng.choice((1, 1, 1, 3))):
            tokens = rng.choice((1, 5, 17, 40, 90, 159, 161))
            kind = "decode" if rng.random() < 0.05 else "prefill"
            prompt = (rng.choice((1, 2)),) * tokens
            burst.append(
                request(
                    f"r{index}.{number}",
                    tokens,
                    arrival=time_s,
                    slo=rng.randrange(1, 400) * 4 * tick,
                    weight=rng.choice((1.0, 3.0)),
                    shed_when_infeasible=rng.random() < 0.1,
                    kind=kind,
                    prefix_hashes=prefix_hashes(prompt, BLOCK_SIZE) if kind == "prefill" else (),
                )
            )
            if rng.random() < 0.25:
                engine.cancel(time_s + rng.randrange(0, 400) * tick, f"r{index}.{number}")
        engine.at(time_s, Arrival(requests=tuple(burst)))
        time_s += rng.choice((0, 0, 4, 40, 160)) * tick
    if rng.random() < 0.3:
        engine.reconfigure(rng.random() * time_s, random_settings(rng))
    return engine


def arrived(engine: VirtualEngine) -> set[str]:
    return {
        r.request_id for entry in engine.log if isinstance(entry.event, Arrival) for r in entry.event.requests
    }


@given(seed=st.integers(0, 2**32))
@settings(max_examples=400, deadline=None)
def test_nothing_is_lost_or_leaked(seed: int) -> None:
    engine = scenario(seed)
    engine.run()
    assert set(engine.outcomes) == arrived(engine), "every request ends in exactly one outcome"
    snapshot = engine.scheduler.snapshot(engine.now_s)
    assert snapshot.running is None
    assert snapshot.suspended == ()
    assert snapshot.waiting == snapshot.waiting_tokens == 0
    assert snapshot.waiting_s == 0.0
    assert snapshot.kv_blocks_free == BLOCKS
    counters = snapshot.counters
    ended = counters.completed + counters.failed + counters.rejected + counters.shed + counters.cancelled
    assert ended == counters.arrived == len(engine.outcomes)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_a_pending_pause_blocks_what_would_run_and_only_one_is_pending(seed: int) -> None:
    engine = scenario(seed)
    engine.run()
    pending: Preempt | None = None
    for entry in engine.log:
        match entry.event:
            case Parked(task_id=task_id) | Completed(task_id=task_id) | Failed(task_id=task_id):
                if pending is not None and pending.task_id == task_id:
                    pending = None  # answered
        for action in entry.actions:
            match action:
                case Submit() | Resume():
                    assert pending is None, "started something while an answer is awaited"
                case Preempt():
                    assert pending is None, "asked while an answer is awaited"
                    pending = action
                case WithdrawPreempt():
                    assert pending is not None
                    assert (action.task_id, action.ticket) == (pending.task_id, pending.ticket)
                    pending = None
                case Cancel(task_id=task_id):
                    if pending is not None and pending.task_id == task_id:
                        pending = None  # it ends instead


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_the_same_events_give_the_same_actions(seed: int) -> None:
    first, second = scenario(seed), scenario(seed)
    first.run()
    second.run()
    assert [(e.now_s, e.event, e.actions) for e in first.log] == [
        (e.now_s, e.event, e.actions) for e in second.log
    ]


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_cancelled_request_frees_all_it_held(seed: int) -> None:
    """Cancel everything in the middle of a run: the pool fills up again without any CapacityFreed."""
    engine = scenario(seed)
    engine.hold_s = 0.0
    engine.run(until_s=0.05)
    for request_id in sorted(arrived(engine) - set(engine.outcomes)):
        engine.cancel(engine.now_s, request_id)
    engine.run()
    assert engine.scheduler.snapshot(engine.now_s).kv_blocks_free == BLOCKS
    assert set(engine.outcomes) == arrived(engine)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_completed_is_said_of_what_a_finished_task_computed_to_its_last_token(seed: int) -> None:
    engine = scenario(seed)
    engine.run()
    tasks = {action.task.task_id: action.task for action in engine.actions(Submit)}
    for entry in engine.log:
        said = {a.request_id for a in entry.actions if isinstance(a, Finish) and a.outcome == "completed"}
        ended: set[str] = set()
        if isinstance(entry.event, Completed):
            ended = {item.request_id for item in tasks[entry.event.task_id].items if item.completes}
        assert said <= ended
        cancelled_before = {name for name, (how, _) in engine.outcomes.items() if how == "cancelled"}
        assert ended - said <= cancelled_before
