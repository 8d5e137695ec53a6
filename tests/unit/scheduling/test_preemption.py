"""Preemption and its races, worked by hand: a prompt of n tokens takes n milliseconds."""

from __future__ import annotations

import pytest

from flowprefill.scheduling.actions import Cancel, Finish, Preempt, Resume, Submit, WithdrawPreempt
from flowprefill.scheduling.events import (
    Arrival,
    Cancelled,
    Completed,
    Failed,
    Parked,
    Progress,
    Reconfigured,
)
from flowprefill.scheduling.settings import SchedulerSettings
from support.scheduling import VirtualEngine, request, scheduler

LONG = request("long", 3000, slo=20.0)
URGENT = request("urgent", 100, arrival=1.0, slo=0.5)


def arrival(*requests) -> Arrival:  # type: ignore[no-untyped-def]
    return Arrival(requests=requests)


def running_long(**settings: object):  # type: ignore[no-untyped-def]
    s = scheduler(**settings)
    (submit,) = s.handle(arrival(LONG), 0.0)
    return s, submit.task.task_id


def test_an_urgent_request_gets_in_and_the_long_one_goes_on_where_it_was() -> None:
    engine = VirtualEngine(scheduler(), ack_s=0.01)
    engine.arrive(LONG, URGENT)
    engine.run()
    # urgent: 1.0 + ack 0.01 + 0.1; long: 3.0 of work plus the 0.1 in between, its pause costs nothing
    assert engine.outcomes == {
        "urgent": ("completed", pytest.approx(1.11)),
        "long": ("completed", pytest.approx(3.1)),
    }
    assert engine.busy_s == pytest.approx(3.1)


def test_a_request_that_can_meet_its_deadline_goes_before_one_that_cannot() -> None:
    engine = VirtualEngine(scheduler(preemption="none", batch_token_budget=600))
    engine.arrive(
        request("first", 1000, slo=9.0),
        request("lost", 500, slo=0.6, arrival=0.1),
        request("fits", 500, slo=5.0, arrival=0.2),
    )
    engine.run()
    assert engine.order_started == ["first", "fits", "lost"]


def test_nothing_is_submitted_while_a_pause_is_pending_and_the_best_is_chosen_when_parked() -> None:
    s, task_id = running_long()
    (preempt,) = s.handle(arrival(URGENT), 1.0)
    assert preempt == Preempt(task_id=task_id, ticket=1)
    assert s.handle(arrival(request("more", 100, arrival=1.01, slo=0.2)), 1.01) == ()
    (submit,) = s.handle(Parked(task_id=task_id, ticket=1), 1.02)
    assert submit.task.items[0].request_id == "more", "the more urgent one came after the pause was asked for"


def test_a_completion_that_overtakes_the_pause_is_normal() -> None:
    s, task_id = running_long()
    s.handle(arrival(URGENT), 1.0)
    actions = s.handle(Completed(task_id=task_id, executed_s=1.0), 1.01)
    assert [type(action) for action in actions] == [Finish, Submit]
    assert s.handle(Parked(task_id=task_id, ticket=1), 1.02) == (), "an ACK of a task that has ended"


def test_a_failure_that_overtakes_the_pause_fails_its_own_requests_only() -> None:
    s, task_id = running_long()
    s.handle(arrival(URGENT), 1.0)
    finish, submit = s.handle(Failed(task_id=task_id, error="out of memory"), 1.01)
    assert finish == Finish(request_id="long", outcome="failed", reason="out of memory")
    assert submit.task.items[0].request_id == "urgent"
    assert s.snapshot(1.01).kv_blocks_free == 10_000 - 7


def test_a_pause_whose_reason_was_cancelled_is_withdrawn() -> None:
    s, task_id = running_long()
    s.handle(arrival(URGENT), 1.0)
    actions = s.handle(Cancelled(request_id="urgent"), 1.001)
    assert actions == (
        Finish(request_id="urgent", outcome="cancelled"),
        WithdrawPreempt(task_id=task_id, ticket=1),
    )
    assert s.snapshot(1.001).counters.withdrawn == 1


def test_a_task_that_parked_before_the_withdrawal_reached_it_is_resumed() -> None:
    s, task_id = running_long()
    s.handle(arrival(URGENT), 1.0)
    s.handle(Cancelled(request_id="urgent"), 1.001)
    assert s.handle(Parked(task_id=task_id, ticket=1), 1.002) == (Resume(task_id=task_id),)


def test_a_late_answer_to_an_old_ticket_is_believed_once_and_a_stale_one_never() -> None:
    """Asked (1), withdrawn, asked again (2); the task had parked on 1. The answer to 2 that may follow is stale."""
    s, task_id = running_long()
    s.handle(arrival(URGENT), 1.0)
    s.handle(Cancelled(request_id="urgent"), 1.001)
    (again,) = s.handle(arrival(request("urgent2", 100, arrival=1.002, slo=0.5)), 1.002)
    assert again == Preempt(task_id=task_id, ticket=2)
    (submit,) = s.handle(Parked(task_id=task_id, ticket=1), 1.003)
    assert submit.task.items[0].request_id == "urgent2", "it stands parked, whichever question it answers"
    s.handle(Completed(task_id=submit.task.task_id, executed_s=0.1), 1.103)
    assert s.handle(Parked(task_id=task_id, ticket=2), 1.104) == (), "it has the baton again"
    assert s.snapshot(1.104).running is not None


def test_tickets_strictly_increase() -> None:
    engine = VirtualEngine(scheduler(), ack_s=0.001)
    engine.arrive(LONG, *(request(f"u{i}", 50, arrival=0.5 + 0.2 * i, slo=0.1) for i in range(6)))
    engine.run()
    tickets = [action.ticket for action in engine.actions(Preempt)]
    assert tickets == sorted(set(tickets))
    assert len(tickets) == 6


def test_preemption_nests() -> None:
    engine = VirtualEngine(scheduler())
    engine.arrive(
        request("a", 1000, slo=50.0),
        request("b", 1000, arrival=0.1, slo=20.0),
        request("c", 1000, arrival=0.2, slo=10.0),
        request("d", 1000, arrival=0.3, slo=5.0),
    )
    engine.run()
    ends = {name: end for name, (_, end) in engine.outcomes.items()}
    assert ends == {"d": 1.3, "c": pytest.approx(2.2), "b": pytest.approx(3.1), "a": pytest.approx(4.0)}


def test_no_pause_is_asked_for_a_request_whose_task_could_not_be_suspended() -> None:
    s, _ = running_long(max_suspended=0)
    assert s.handle(arrival(URGENT), 1.0) == ()


def test_the_limit_counts_parked_tasks_and_a_parked_one_may_still_swap_with_the_running_one() -> None:
    s = scheduler(max_suspended=1)
    (first,) = s.handle(arrival(request("a", 5000, slo=50.0)), 0.0)
    (pause,) = s.handle(arrival(request("b", 5000, arrival=0.1, slo=20.0)), 0.1)
    (second,) = s.handle(Parked(task_id=pause.task_id, ticket=pause.ticket), 0.1)
    assert s.handle(arrival(request("c", 100, arrival=0.2, slo=1.0)), 0.2) == (), "two would be suspended"
    # b turns out hopeless (half done after 17 s): the parked a, which can be met, precedes it now. c is late too.
    progress = Progress(task_id=second.task.task_id, work_done=0.5, executed_s=17.0)
    (swap,) = s.handle(Cancelled(request_id="nobody", progress=progress), 17.3)
    assert isinstance(swap, Preempt)
    (resume,) = s.handle(Parked(task_id=swap.task_id, ticket=swap.ticket), 17.3)
    assert resume == Resume(task_id=first.task.task_id)


def test_no_pause_is_asked_for_a_request_whose_blocks_are_not_free() -> None:
    s = scheduler(blocks=190, recompute_suspended=False)  # long takes 188 of them
    s.handle(arrival(LONG), 0.0)
    assert s.handle(arrival(URGENT), 1.0) == ()
    assert isinstance(s.handle(arrival(request("tiny", 32, arrival=1.0, slo=0.5)), 1.0)[0], Preempt)


@pytest.mark.parametrize("preemption", ["none", "chunk"])
def test_without_preemption_nobody_is_asked_to_pause(preemption: str) -> None:
    s, _ = running_long(preemption=preemption, chunk_tokens=4096)
    assert s.handle(arrival(URGENT), 1.0) == ()


@pytest.mark.parametrize(("preemption", "granularity"), [("operator", "operator"), ("layer", "layer")])
def test_tasks_carry_their_granularity(preemption: str, granularity: str) -> None:
    (submit,) = scheduler(preemption=preemption).handle(arrival(LONG), 0.0)
    assert submit.task.granularity == granularity


def test_switching_preemption_off_takes_the_pause_back() -> None:
    s, task_id = running_long()
    s.handle(arrival(URGENT), 1.0)
    settings = SchedulerSettings(preemption="none", ageing=None)
    assert s.handle(Reconfigured(settings=settings), 1.0) == (WithdrawPreempt(task_id=task_id, ticket=1),)


def test_a_policy_change_orders_the_waiting_anew_once() -> None:
    engine = VirtualEngine(scheduler(policy="fcfs", preemption="none", batch_token_budget=1))
    engine.arrive(
        request("running", 1000, slo=9.0),
        request("late", 300, arrival=0.1, slo=8.0),
        request("soon", 300, arrival=0.2, slo=3.0),
    )
    engine.reconfigure(0.5, SchedulerSettings(policy="edf", preemption="none", ageing=None))
    engine.run()
    assert engine.order_started == ["running", "soon+late"]


def test_remaining_time_of_a_running_task_counts_work_and_not_wall_time() -> None:
    """After 2.9 of 3.0 s the long one needs 0.1 s more; a fresh start would need 3.0 and miss its deadline."""
    s = scheduler()
    (submit,) = s.handle(arrival(request("long", 3000, slo=3.5)), 0.0)
    progress = Progress(task_id=submit.task.task_id, work_done=2.9 / 3.0, executed_s=2.9)
    assert (
        s.handle(Arrival(requests=(request("later", 100, arrival=2.9, slo=5.0),), progress=progress), 2.9)
        == ()
    )
    running = s.snapshot(2.9).running
    assert running is not None
    assert running.remaining_s == pytest.approx(0.1)
    assert running.feasible


def test_a_just_finished_request_does_not_look_hopeless() -> None:
    """With all work done nothing remains: predict(0) is 0, so a deadline just ahead still counts as met."""
    s = scheduler()
    (submit,) = s.handle(arrival(request("a", 1000, slo=1.05)), 0.0)
    progress = Progress(task_id=submit.task.task_id, work_done=1.0, executed_s=1.0)
    # b's deadline is later. Were a hopeless, b would preempt it.
    assert (
        s.handle(Arrival(requests=(request("b", 100, arrival=1.0, slo=1.0),), progress=progress), 1.0) == ()
    )


@pytest.mark.parametrize("live", [True, False])
def test_a_parked_task_competes_and_can_be_cancelled(live: bool) -> None:
    s, task_id = running_long()
    s.handle(arrival(URGENT), 1.0)
    (submit,) = s.handle(Parked(task_id=task_id, ticket=1), 1.0)
    if live:
        _, resume = s.handle(Completed(task_id=submit.task.task_id, executed_s=0.1), 1.1)
        assert resume == Resume(task_id=task_id)
        return
    actions = s.handle(Cancelled(request_id="long"), 1.05)
    assert actions == (Finish(request_id="long", outcome="cancelled"), Cancel(task_id=task_id))
    s.handle(Failed(task_id=task_id, error=None), 1.06)
    assert s.snapshot(1.06).suspended == ()
    assert s.snapshot(1.06).kv_blocks_free == 10_000 - 7


def test_a_parked_task_that_fails_leaves_the_running_one_alone() -> None:
    s, task_id = running_long()
    s.handle(arrival(URGENT), 1.0)
    s.handle(Parked(task_id=task_id, ticket=1), 1.0)
    assert s.handle(Failed(task_id=task_id, error="device lost"), 1.05) == (
        Finish(request_id="long", outcome="failed", reason="device lost"),
    )
    assert s.snapshot(1.05).running is not None
