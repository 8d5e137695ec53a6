"""A client that leaves frees what it held, wherever its request is."""

from __future__ import annotations

from flowprefill.scheduling.actions import Cancel, Finish, Submit
from flowprefill.scheduling.events import Arrival, Cancelled, CapacityFreed, Completed, Failed, Parked
from support.scheduling import VirtualEngine, request, scheduler

CANCELLED = "cancelled"


def test_a_waiting_request_never_runs() -> None:
    engine = VirtualEngine(scheduler(preemption="none"))
    engine.arrive(request("a", 1000, slo=5.0), request("b", 100, arrival=0.1, slo=5.0))
    engine.cancel(0.5, "b")
    engine.run()
    assert engine.outcomes["b"] == (CANCELLED, 0.5)
    assert engine.order_started == ["a"]


def test_a_running_request_ends_at_once_and_its_blocks_come_back_when_the_engine_let_go() -> None:
    s = scheduler()
    (submit,) = s.handle(Arrival(requests=(request("a", 160),)), 0.0)
    task_id = submit.task.task_id
    assert s.handle(Cancelled(request_id="a"), 0.1) == (
        Finish(request_id="a", outcome=CANCELLED),
        Cancel(task_id=task_id),
    )
    assert s.snapshot(0.1).kv_blocks_free == 9990, "the engine may still write them"
    assert s.handle(Arrival(requests=(request("b", 100, arrival=0.1),)), 0.1) == (), "one task at a time"
    (submit,) = s.handle(Failed(task_id=task_id, error=None), 0.2)
    assert isinstance(submit, Submit)
    assert s.snapshot(0.2).kv_blocks_free == 10_000 - 7


def test_a_cancelled_task_that_reaches_its_end_first_frees_its_blocks_too() -> None:
    s = scheduler()
    (submit,) = s.handle(Arrival(requests=(request("a", 160),)), 0.0)
    s.handle(Cancelled(request_id="a"), 0.1)
    assert s.handle(Completed(task_id=submit.task.task_id, executed_s=0.16), 0.2) == ()
    assert s.snapshot(0.2).kv_blocks_free == 10_000


def test_a_member_of_a_batch_ends_at_once_and_the_others_go_on() -> None:
    s = scheduler()
    s.handle(Arrival(requests=(request("x", 100, slo=0.2),)), 0.0)
    s.handle(Arrival(requests=(request("a", 160, slo=9.0), request("b", 160, slo=9.0))), 0.0)
    (_, submit) = s.handle(Completed(task_id=1, executed_s=0.1), 0.1)
    assert [item.request_id for item in submit.task.items] == ["a", "b"]
    s.handle(CapacityFreed(request_ids=("x",)), 0.1)
    assert s.handle(Cancelled(request_id="a"), 0.2) == (Finish(request_id="a", outcome=CANCELLED),)
    assert s.snapshot(0.2).kv_blocks_free == 9980
    assert s.handle(Completed(task_id=2, executed_s=0.3), 0.4) == (
        Finish(request_id="b", outcome="completed"),
    )
    assert s.snapshot(0.4).kv_blocks_free == 9990, "a's blocks are back, b's wait to be pulled"


def test_the_last_live_member_takes_the_task_with_it_and_it_is_cancelled_once() -> None:
    s = scheduler()
    s.handle(Arrival(requests=(request("x", 100, slo=0.2),)), 0.0)
    s.handle(Arrival(requests=(request("a", 160, slo=9.0), request("b", 160, slo=9.0))), 0.0)
    s.handle(Completed(task_id=1, executed_s=0.1), 0.1)
    s.handle(Cancelled(request_id="a"), 0.2)
    assert Cancel(task_id=2) in s.handle(Cancelled(request_id="b"), 0.2)
    assert s.handle(Cancelled(request_id="b"), 0.2) == ()


def test_unknown_and_finished_ids_are_ignored() -> None:
    s = scheduler()
    assert s.handle(Cancelled(request_id="ghost"), 0.0) == ()
    s.handle(Arrival(requests=(request("a"),)), 0.0)
    s.handle(Completed(task_id=1, executed_s=0.01), 0.1)
    assert s.handle(Cancelled(request_id="a"), 0.2) == ()
    assert s.snapshot(0.2).kv_blocks_free == 9999, "its KV stays until whoever needs it says so"
    assert s.handle(CapacityFreed(request_ids=("ghost", "a")), 0.3) == ()
    assert s.snapshot(0.3).kv_blocks_free == 10_000


def test_cancelling_while_the_pause_is_pending_unwinds_the_task_even_when_it_has_parked() -> None:
    s = scheduler()
    s.handle(Arrival(requests=(request("long", 3000, slo=9.0),)), 0.0)
    s.handle(Arrival(requests=(request("urgent", 100, arrival=1.0, slo=0.5),)), 1.0)
    assert Cancel(task_id=1) in s.handle(Cancelled(request_id="long"), 1.001)
    (submit,) = s.handle(Parked(task_id=1, ticket=1), 1.002)
    assert submit.task.items[0].request_id == "urgent", "it parked and unwinds without the baton"
    assert s.handle(Failed(task_id=1, error=None), 1.003) == ()
    assert s.snapshot(1.003).kv_blocks_free == 10_000 - 7


def test_an_id_is_in_use_until_its_kv_is_given_back() -> None:
    import pytest

    s = scheduler()
    s.handle(Arrival(requests=(request("a"),)), 0.0)
    s.handle(Completed(task_id=1, executed_s=0.01), 0.1)
    with pytest.raises(ValueError, match="'a' is in use"):
        s.handle(Arrival(requests=(request("a", arrival=0.2),)), 0.2)
    with pytest.raises(ValueError, match="'b' is in use"):
        s.handle(Arrival(requests=(request("b"), request("b"))), 0.2)
    s.handle(CapacityFreed(request_ids=("a",)), 0.3)
    assert s.handle(Arrival(requests=(request("a", arrival=0.3),)), 0.3)
