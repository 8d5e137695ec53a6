"""When an urgent request lacks KV: who is dropped, who never is. A prompt of n tokens takes n milliseconds."""

from __future__ import annotations

import pytest

from flowprefill.scheduling.actions import Cancel, Preempt, Submit
from flowprefill.scheduling.events import Arrival, Cancelled, CapacityFreed, Completed, Failed, Parked
from flowprefill.scheduling.kv import KVCachePool, prefix_hashes
from flowprefill.scheduling.scheduler import Scheduler
from flowprefill.scheduling.state import WaitingRequest
from flowprefill.scheduling.suspended import MAX_RECOMPUTES, Holder, victims
from support.scheduling import VirtualEngine, request, scheduler


def two_parked(**settings: object) -> Scheduler:
    """Thirty blocks: `late` (10, deadline 50) and `later` (10, deadline 60) are parked, `mid` (5) runs."""
    s = scheduler(blocks=30, **settings)
    s.handle(Arrival(requests=(request("later", 160, slo=60.0),)), 0.0)
    s.handle(Arrival(requests=(request("late", 160, slo=50.0),)), 0.0)
    s.handle(Parked(task_id=1, ticket=1), 0.0)
    s.handle(Arrival(requests=(request("mid", 80, slo=20.0),)), 0.0)
    (submit,) = s.handle(Parked(task_id=2, ticket=2), 0.0)
    assert submit.task.items[0].request_id == "mid"
    assert s.snapshot(0.0).kv_blocks_free == 5
    return s


def test_the_suspended_task_with_the_latest_deadline_is_dropped_and_then_the_urgent_one_gets_in() -> None:
    s = two_parked()
    # Ten blocks are needed and five are free.
    assert s.handle(Arrival(requests=(request("urgent", 160, slo=1.0),)), 0.0) == (Cancel(task_id=1),)
    (pause,) = s.handle(Failed(task_id=1, error=None), 0.001)
    assert pause == Preempt(task_id=3, ticket=3), "asked for only now that the blocks are there"
    (submit,) = s.handle(Parked(task_id=3, ticket=3), 0.002)
    assert submit.task.items[0].request_id == "urgent"
    snapshot = s.snapshot(0.002)
    assert snapshot.counters.recomputes == 1
    assert snapshot.waiting == 1, "the dropped one waits again"


def test_several_are_dropped_when_one_is_not_enough() -> None:
    s = two_parked()
    assert s.handle(Arrival(requests=(request("urgent", 400, slo=1.0),)), 0.0) == (
        Cancel(task_id=1),
        Cancel(task_id=2),
    )


def test_nothing_is_dropped_when_it_would_not_suffice_for_the_running_one_is_never_dropped() -> None:
    s = two_parked()
    assert s.handle(Arrival(requests=(request("urgent", 480, slo=1.0),)), 0.0) == ()


def test_nothing_is_dropped_when_the_setting_says_so() -> None:
    s = two_parked(recompute_suspended=False)
    assert s.handle(Arrival(requests=(request("urgent", 160, slo=1.0),)), 0.0) == ()


def test_nothing_is_dropped_for_a_request_that_is_late_anyway_or_ranks_behind() -> None:
    s = two_parked()
    assert s.handle(Arrival(requests=(request("hopeless", 160, slo=0.1),)), 0.0) == ()
    assert s.handle(Arrival(requests=(request("behind", 160, slo=70.0),)), 0.0) == ()


def test_nothing_is_dropped_for_a_lost_deadline_though_its_policy_puts_it_first() -> None:
    s = two_parked(policy="edf")
    assert s.handle(Arrival(requests=(request("hopeless", 160, slo=0.1),)), 0.0) == ()
    assert s.handle(Arrival(requests=(request("urgent", 160, slo=0.5),)), 0.0) == (Cancel(task_id=1),)


def test_only_work_that_ranks_behind_is_dropped() -> None:
    kv = KVCachePool(4, 16)
    holders = []
    for name, deadline in (("before", 1.0), ("behind", 3.0)):
        kv.allocate(name, 32)
        waiting = WaitingRequest(request=request(name, 32), sequence=0, num_computed=16)
        holders.append(Holder(work=waiting, rank=(0, deadline, 0, name), deadline_s=deadline))
    assert victims(holders, (0, 2.0, 0, "urgent"), 2, kv) == (holders[1],)
    assert victims(holders, (0, 2.0, 0, "urgent"), 3, kv) == ()


def test_an_idle_engine_waits_the_moment_until_the_blocks_are_free() -> None:
    s = two_parked()
    s.handle(Arrival(requests=(request("urgent", 160, slo=1.0),)), 0.0)
    assert [type(a).__name__ for a in s.handle(Completed(task_id=3, executed_s=0.08), 0.08)] == ["Finish"]
    actions = s.handle(Failed(task_id=1, error=None), 0.081)
    assert isinstance(actions[0], Submit)
    assert actions[0].task.items[0].request_id == "urgent"


def test_a_dropped_request_that_is_cancelled_meanwhile_does_not_come_back() -> None:
    s = two_parked()
    s.handle(Arrival(requests=(request("urgent", 160, slo=1.0),)), 0.0)
    actions = s.handle(Cancelled(request_id="later"), 0.0005)
    assert [a.outcome for a in actions] == ["cancelled"], "Cancel was sent already"
    s.handle(Failed(task_id=1, error=None), 0.001)
    assert s.snapshot(0.001).waiting == 1, "only the urgent one"
    assert s.snapshot(0.001).counters.recomputes == 0


def test_a_request_is_dropped_at_most_so_often() -> None:
    s = scheduler(blocks=20)
    now = 0.0
    s.handle(Arrival(requests=(request("victim", 160, slo=900.0),)), now)
    task_id = ticket = 1
    for turn in range(MAX_RECOMPUTES + 1):
        # `mid` pauses the victim and takes 5 of the 10 blocks left; `urgent` then needs more than there are.
        s.handle(Arrival(requests=(request(f"mid{turn}", 80, arrival=now, slo=100.0 - turn),)), now)
        (submit,) = s.handle(Parked(task_id=task_id, ticket=ticket), now)
        actions = s.handle(Arrival(requests=(request(f"urgent{turn}", 160, arrival=now, slo=1.0),)), now)
        if turn == MAX_RECOMPUTES:
            assert actions == (), "it has been dropped often enough"
            return
        assert actions == (Cancel(task_id=task_id),)
        (pause,) = s.handle(Failed(task_id=task_id, error=None), now)
        (urgent,) = s.handle(Parked(task_id=pause.task_id, ticket=pause.ticket), now)
        s.handle(Completed(task_id=urgent.task.task_id, executed_s=0.16), now + 0.2)
        s.handle(CapacityFreed(request_ids=(f"urgent{turn}",)), now + 0.2)
        *_, again = s.handle(Completed(task_id=submit.task.task_id, executed_s=0.08), now + 0.3)
        assert again.task.items[0].request_id == "victim"
        s.handle(CapacityFreed(request_ids=(f"mid{turn}",)), now + 0.3)
        task_id, ticket = again.task.task_id, pause.ticket + 1
        now += 1.0


def test_shared_blocks_are_not_counted_as_gain() -> None:
    """The parked one shares its eight first blocks with a finished request whose KV is still being pulled."""
    prompt = prefix_hashes(range(160), 16)
    s = scheduler(blocks=25)
    s.handle(Arrival(requests=(request("done", 130, prefix_hashes=prompt[:8]),)), 0.0)
    s.handle(Completed(task_id=1, executed_s=0.13), 0.13)
    s.handle(Arrival(requests=(request("parked", 160, slo=50.0, prefix_hashes=prompt),)), 0.2)
    s.handle(Arrival(requests=(request("mid", 80, arrival=0.2, slo=20.0),)), 0.2)
    s.handle(Parked(task_id=2, ticket=1), 0.2)
    # 9 (done) + 2 (parked alone) + 5 (mid) are taken, 9 are free; dropping the parked one gives 2, not 10.
    assert s.snapshot(0.2).kv_blocks_free == 9
    assert s.handle(Arrival(requests=(request("urgent", 12 * 16, arrival=0.2, slo=1.0),)), 0.2) == ()
    assert s.handle(Arrival(requests=(request("less", 11 * 16, arrival=0.2, slo=0.9),)), 0.2) == (
        Cancel(task_id=2),
    )


def test_a_continuation_between_chunks_is_dropped_at_once_and_computed_again() -> None:
    engine = VirtualEngine(scheduler(blocks=20, chunk_tokens=100, preemption="chunk"))
    engine.arrive(request("long", 240, slo=9.0), request("urgent", 100, arrival=0.05, slo=0.4))
    engine.run()
    assert engine.outcomes["urgent"] == ("completed", pytest.approx(0.2))
    assert engine.outcomes["long"] == ("completed", pytest.approx(0.44)), "100 of 240 ms were computed twice"
    assert engine.scheduler.snapshot(1.0).counters.recomputes == 1


def test_with_everything_suspended_and_no_room_the_best_suspended_goes_on() -> None:
    s = two_parked(recompute_suspended=False)
    s.handle(Arrival(requests=(request("urgent", 400, slo=1.0),)), 0.0)
    *_, resume = s.handle(Completed(task_id=3, executed_s=0.08), 0.08)
    assert resume.task_id == 2
