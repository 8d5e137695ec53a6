"""Who is turned away, when, and with which words."""

from __future__ import annotations

import pytest

from flowprefill.scheduling.actions import Finish
from flowprefill.scheduling.events import Arrival, Progress, Tick
from flowprefill.scheduling.settings import Ageing, SchedulerSettings
from support.scheduling import VirtualEngine, request, scheduler


def test_a_prompt_larger_than_the_pool_is_rejected_at_once() -> None:
    s = scheduler(blocks=4, block_size=16)
    assert s.handle(Arrival(requests=(request("big", 65),)), 0.0) == (
        Finish(request_id="big", outcome="rejected", reason="the prompt needs 5 KV blocks; the pool has 4"),
    )
    assert s.handle(Arrival(requests=(request("fits", 64),)), 0.0)


def test_the_queue_is_bounded() -> None:
    s = scheduler(queue_limit=2, preemption="none")
    s.handle(Arrival(requests=(request("running", 1000, slo=5.0),)), 0.0)
    (rejected,) = s.handle(Arrival(requests=tuple(request(f"r{i}", 10, slo=9.0) for i in range(3))), 0.1)
    assert isinstance(rejected, Finish)
    assert (rejected.request_id, rejected.outcome) == ("r2", "rejected")
    assert "queue takes 2" in rejected.reason


def test_decode_steps_pass_a_full_queue() -> None:
    s = scheduler(queue_limit=1, preemption="none")
    s.handle(Arrival(requests=(request("running", 1000, slo=5.0),)), 0.0)
    s.handle(Arrival(requests=(request("r", 10),)), 0.1)
    assert s.handle(Arrival(requests=(request("step", 4, kind="decode"),)), 0.2) == ()
    assert s.snapshot(0.2).waiting == 2


def test_a_request_that_asks_for_it_is_shed_when_it_comes_too_late() -> None:
    s = scheduler()
    (shed,) = s.handle(Arrival(requests=(request("r", 500, slo=0.4, shed_when_infeasible=True),)), 0.0)
    assert (shed.outcome, shed.request_id) == ("shed", "r")
    assert "0.100 s" in shed.reason
    s.handle(Arrival(requests=(request("q", 500, slo=0.4),)), 0.0)
    assert s.snapshot(0.0).running is not None, "others run late rather than never"


def test_a_waiting_request_is_shed_the_moment_its_slack_is_gone() -> None:
    engine = VirtualEngine(scheduler(preemption="none"))
    engine.arrive(
        request("running", 1000, slo=5.0),
        request("r", 100, arrival=0.1, slo=0.5, shed_when_infeasible=True),
        request("patient", 100, arrival=0.1, slo=0.5),
    )
    engine.run()
    assert engine.outcomes["r"] == ("shed", pytest.approx(0.5, abs=1e-5))  # 0.6 less the 0.1 it needs
    assert engine.outcomes["patient"][0] == "completed"


def test_a_rising_correction_sheds_what_it_makes_hopeless() -> None:
    s = scheduler(preemption="none", online_correction=True)
    s.handle(Arrival(requests=(request("a", 1000, slo=9.0),)), 0.0)
    s.handle(Arrival(requests=(request("r", 900, slo=1.95, shed_when_infeasible=True),)), 0.0)
    assert s.next_tick_s == pytest.approx(1.05)
    from flowprefill.scheduling.events import Completed

    actions = s.handle(Completed(task_id=1, executed_s=2.0), 1.0)  # twice as slow as profiled
    assert ("r", "shed") in [(a.request_id, a.outcome) for a in actions if isinstance(a, Finish)]


def test_no_tick_is_armed_when_time_alone_changes_nothing() -> None:
    s = scheduler()
    assert s.next_tick_s is None
    s.handle(Arrival(requests=(request("a", 1000, slo=0.1), request("b", 3000, slo=0.2))), 0.0)
    assert s.next_tick_s is None


def test_under_d_edf_a_tick_comes_when_the_running_deadline_passes_and_others_get_in() -> None:
    s = scheduler(policy="d-edf")
    s.handle(Arrival(requests=(request("a", 3000, slo=1.0),)), 0.0)
    assert s.next_tick_s is None, "nobody waits"
    s.handle(Arrival(requests=(request("b", 3000, slo=9.0),)), 0.1)
    assert s.next_tick_s == 1.0
    progress = Progress(task_id=1, work_done=1 / 3, executed_s=1.0)
    (pause,) = s.handle(Tick(progress=progress), 1.0)
    assert type(pause).__name__ == "Preempt"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"preemption": "chunk"}, "needs chunk_tokens"),
        ({"batch_token_budget": 0}, "batch_token_budget is 0"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
        ({"max_suspended": -1}, "max_suspended is -1"),
        ({"queue_limit": 0}, "queue_limit is 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SchedulerSettings(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{"factor": 0.0}, {"share": 0.0}, {"share": 1.5}, {"quantum_s": 0.0}])
def test_ageing_that_makes_no_sense_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(fields))} is"):
        Ageing(**fields)
