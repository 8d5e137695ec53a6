"""Which requests share a pass. Costs by hand: a pass takes 10 ms plus 1 ms a token unless told otherwise."""

from __future__ import annotations

import pytest

from flowprefill.request import Request
from flowprefill.scheduling.actions import Submit
from flowprefill.scheduling.events import Arrival, CapacityFreed, Completed, Parked
from flowprefill.scheduling.kv import prefix_hashes
from flowprefill.scheduling.scheduler import Scheduler
from support.scheduling import VirtualEngine, request, scheduler

PASS = (0.010, 0.001, 0.0, 0.0)
QUADRATIC = (0.0, 0.0, 1e-6, 2e-6)


def batch(s: Scheduler, *requests: Request, now: float = 0.0) -> list[str]:
    """Ids of the batch that is made when all of them wait and the engine comes free at `now`."""
    for action in s.handle(Arrival(requests=requests), now):
        if isinstance(action, Submit):
            return [item.request_id for item in action.task.items]
    return []


def test_short_prompts_share_a_pass_up_to_the_budget() -> None:
    s = scheduler(coefficients=PASS, batch_token_budget=100)
    members = batch(s, *(request(f"r{i}", 30, slo=10.0 + i) for i in range(5)))
    assert members == ["r0", "r1", "r2"]


def test_one_that_does_not_fit_is_passed_over_for_a_smaller_one() -> None:
    s = scheduler(coefficients=PASS, batch_token_budget=100)
    members = batch(s, request("a", 60, slo=10.0), request("b", 60, slo=11.0), request("c", 40, slo=12.0))
    assert members == ["a", "c"]


def test_a_prompt_beyond_the_budget_runs_alone() -> None:
    s = scheduler(coefficients=PASS, batch_token_budget=100)
    assert batch(s, request("long", 500, slo=10.0), request("b", 10, slo=11.0)) == ["long"]


def test_a_candidate_joins_only_if_the_heads_deadline_holds() -> None:
    # 10 + 100 + 100 ms > 200 ms, 10 + 100 + 80 ms < 200 ms
    assert batch(scheduler(coefficients=PASS), request("head", 100, slo=0.2), request("b", 100, slo=9.0)) == [
        "head"
    ]
    assert batch(scheduler(coefficients=PASS), request("head", 100, slo=0.2), request("b", 80, slo=9.0)) == [
        "head",
        "b",
    ]


def test_a_candidate_joins_only_if_every_other_members_deadline_holds() -> None:
    """Under fcfs the head is patient and the second member is not: it is the second that keeps the third out."""
    requests = (
        request("head", 50, slo=9.0),
        request("tight", 50, slo=0.15),
        request("third", 60, slo=9.0),
        request("fourth", 30, slo=9.0),
    )
    assert batch(scheduler(coefficients=PASS, policy="fcfs"), *requests) == ["head", "tight", "fourth"]


def test_a_candidate_that_would_miss_in_the_batch_but_not_alone_stays_out() -> None:
    s = scheduler(coefficients=PASS, policy="fcfs")
    assert batch(s, request("head", 100, slo=9.0), request("b", 50, slo=0.1)) == ["head"]


def test_a_deadline_that_is_lost_already_has_no_say() -> None:
    s = scheduler(coefficients=PASS, policy="fcfs")
    members = batch(s, request("head", 100, slo=0.05), request("b", 50, slo=0.02), request("c", 50, slo=9.0))
    assert members == ["head", "b", "c"]


def test_a_candidate_may_not_make_a_better_ranked_one_late_by_overtaking_it() -> None:
    """b is too long to join and has 20 ms to spare behind the head; c would take 30 of them, d takes 10."""
    s = scheduler(coefficients=PASS, batch_token_budget=100)
    requests = (
        request("head", 50, slo=1.0),
        request("b", 200, slo=0.06 + 0.21 + 0.02),
        request("c", 30, slo=3.0),
        request("d", 10, slo=3.0),
    )
    s = scheduler(coefficients=PASS, batch_token_budget=100, policy="fcfs")
    assert batch(s, *requests) == ["head", "d"]


def test_a_candidate_behind_a_parked_task_may_not_make_it_late() -> None:
    s = scheduler(coefficients=PASS)
    s.handle(Arrival(requests=(request("long", 1000, slo=1.5),)), 0.0)
    # long has 0.49 s to spare. The urgent one takes 110 ms; with c it would take 610, in time for itself.
    s.handle(
        Arrival(
            requests=(
                request("urgent", 100, slo=1.2),
                request("c", 500, slo=9.0),
                request("d", 300, slo=9.0),
            )
        ),
        0.0,
    )
    (submit,) = s.handle(Parked(task_id=1, ticket=1), 0.0)
    assert [item.request_id for item in submit.task.items] == ["urgent", "d"]


def test_without_the_guard_batches_fill_up_whatever_happens() -> None:
    s = scheduler(coefficients=PASS, guard_deadlines=False)
    assert batch(s, request("head", 100, slo=0.2), request("b", 1000, slo=9.0)) == ["head", "b"]


def test_a_batch_is_priced_as_packed_and_not_as_one_long_prompt() -> None:
    """Two prompts of 1,000 tokens take 1 s each by attention alone: 2 s together, 4 s as one prompt of 2,000."""
    s = scheduler(coefficients=QUADRATIC)
    (submit,) = s.handle(Arrival(requests=(request("a", 1000, slo=3.0), request("b", 1000, slo=3.5))), 0.0)
    assert [item.request_id for item in submit.task.items] == ["a", "b"]
    assert submit.task.predicted_s == pytest.approx(2.0)


def test_the_budget_counts_tokens_net_of_cached_prefix() -> None:
    s = scheduler(coefficients=PASS, batch_token_budget=100, block_size=16)
    prompt = prefix_hashes(range(160), 16)
    s.handle(Arrival(requests=(request("first", 160, prefix_hashes=prompt),)), 0.0)
    s.handle(Completed(task_id=1, executed_s=0.2), 0.2)
    (submit,) = s.handle(
        Arrival(
            requests=(
                request("again", 170, slo=5.0, prefix_hashes=prompt),
                request("other", 80, slo=6.0),
            )
        ),
        0.2,
    )
    again, other = submit.task.items
    assert (again.start, again.num_tokens, again.completes) == (160, 10, True)
    assert (other.start, other.num_tokens) == (0, 80)
    assert again.block_ids[:10] == s.kv.block_ids("first")[:10]


def test_a_waiting_request_is_priced_again_when_its_prefix_was_cached_meanwhile() -> None:
    """At 0.25 it could not be in time with 180 ms to go. With all but ten tokens cached it can, and goes first."""
    s = scheduler(coefficients=PASS, block_size=16, preemption="none", batch_token_budget=1)
    prompt = prefix_hashes(range(160), 16)
    s.handle(Arrival(requests=(request("first", 160, slo=9.0, prefix_hashes=prompt),)), 0.0)
    again = request("again", 170, slo=0.3, prefix_hashes=prompt)
    s.handle(Arrival(requests=(again, request("other", 20, slo=2.0))), 0.0)
    assert s.snapshot(0.0).waiting_tokens == 190
    (_, submit) = s.handle(Completed(task_id=1, executed_s=0.25), 0.25)
    assert [(item.request_id, item.start) for item in submit.task.items] == [("again", 160)]


def test_many_that_share_a_prefix_are_priced_again_within_few_events() -> None:
    """Sixty-four in the event that caches the prefix, the others in the next."""
    s = scheduler(coefficients=PASS, block_size=16, preemption="none", batch_token_budget=1)
    prompt = prefix_hashes(range(32), 16)
    s.handle(Arrival(requests=(request("first", 33, slo=9.0, prefix_hashes=prompt),)), 0.0)
    s.handle(
        Arrival(requests=tuple(request(f"r{i:03}", 40, slo=50.0, prefix_hashes=prompt) for i in range(100))),
        0.0,
    )
    assert s.snapshot(0.0).waiting_tokens == 100 * 40
    s.handle(Completed(task_id=1, executed_s=0.05), 0.05)
    assert s.snapshot(0.05).waiting_tokens <= 64 * 8 + 36 * 40
    s.handle(Arrival(requests=(request("x", 1, slo=90.0),)), 0.06)
    assert s.snapshot(0.06).waiting_tokens == 99 * 8 + 1


def test_blocks_are_counted_for_each_request_rounded_up() -> None:
    """Five blocks: three prompts of 17 tokens need two each, though 51 tokens would fit into four."""
    s = scheduler(coefficients=PASS, blocks=5)
    requests = tuple(request(f"r{i}", 17, slo=5.0 + i) for i in range(3))
    assert batch(s, *requests) == ["r0", "r1"]
    assert s.snapshot(0.0).waiting == 1, "the one without blocks still waits"
    s.handle(Completed(task_id=1, executed_s=0.05), 0.05)
    (submit,) = s.handle(CapacityFreed(request_ids=("r0",)), 0.06)
    assert submit.task.items[0].request_id == "r2"


def test_a_member_without_blocks_is_not_lost() -> None:
    engine = VirtualEngine(scheduler(coefficients=PASS, blocks=4), hold_s=0.5)
    engine.arrive(*(request(f"r{i}", 17, slo=5.0) for i in range(9)))
    engine.run()
    assert {outcome for outcome, _ in engine.outcomes.values()} == {"completed"}
    assert len(engine.outcomes) == 9


def test_a_batch_is_ranked_by_its_earliest_deadline_that_can_still_be_met() -> None:
    """Deadlines 0.3 and 5.0 in one batch. While 0.3 can be met, 1.0 does not precede it; afterwards it does."""
    s = scheduler(coefficients=PASS, policy="s-edf")
    s.handle(Arrival(requests=(request("tight", 100, slo=0.3), request("loose", 150, slo=5.0))), 0.0)
    assert s.snapshot(0.0).running.deadline_s == 0.3
    assert s.handle(Arrival(requests=(request("x", 10, slo=1.0),)), 0.01) == ()
    # The batch needs 260 ms and no work was reported: by 0.05 the tight deadline is lost.
    (pause,) = s.handle(Arrival(requests=(request("y", 10, slo=1.0),)), 0.05)
    assert s.snapshot(0.05).running.deadline_s == 5.0
    assert s.snapshot(0.05).running.feasible
    assert type(pause).__name__ == "Preempt"


def test_a_batch_whose_deadlines_are_all_lost_is_infeasible() -> None:
    s = scheduler(coefficients=PASS)
    s.handle(Arrival(requests=(request("a", 100, slo=0.01), request("b", 150, slo=0.02))), 0.0)
    assert not s.snapshot(0.0).running.feasible


def test_a_parked_batch_gains_no_members() -> None:
    s = scheduler(coefficients=PASS)
    (first,) = s.handle(Arrival(requests=(request("long", 1000, slo=9.0),)), 0.0)
    s.handle(Arrival(requests=(request("urgent", 10, slo=0.1),)), 0.0)
    s.handle(Parked(task_id=1, ticket=1), 0.0)
    s.handle(Arrival(requests=(request("later", 10, slo=20.0),)), 0.0)
    actions = s.handle(Completed(task_id=2, executed_s=0.02), 0.02)
    assert actions[-1].task_id == first.task.task_id
    assert len(first.task.items) == 1


def test_decode_steps_run_alone_in_deadline_order_and_own_no_blocks() -> None:
    s = scheduler(coefficients=PASS)
    step = request("step", 8, slo=0.05, kind="decode")
    (submit,) = s.handle(Arrival(requests=(step, request("p", 10, slo=0.5))), 0.0)
    assert submit.task.kind == "decode"
    assert [item.request_id for item in submit.task.items] == ["step"]
    assert submit.task.items[0].block_ids == ()
    finish, prefill = s.handle(Completed(task_id=1, executed_s=0.02), 0.02)
    assert finish.outcome == "completed"
    assert prefill.task.items[0].request_id == "p"
    assert s.handle(Arrival(requests=(request("step", 8, arrival=0.03, slo=0.05, kind="decode"),)), 0.03), (
        "the next step may use the same id, and it precedes the prefill"
    )


@pytest.mark.parametrize("policy", ["d-edf", "s-edf", "moore-hodgson"])
def test_a_decode_step_that_is_late_still_goes_before_prompts_and_is_not_paused_for_one(policy: str) -> None:
    """A policy that gives up lost deadlines must not stall the answers that are under way."""
    s = scheduler(policy=policy, max_suspended=0)
    s.handle(Arrival(requests=(request("long", 1000, slo=9.0),)), 0.0)
    s.handle(Arrival(requests=(request("step", 8, slo=0.05, kind="decode"), request("p", 10, slo=5.0))), 0.1)
    _, submit = s.handle(Completed(task_id=1, executed_s=1.0), 1.0)
    assert [item.request_id for item in submit.task.items] == ["step"]
    assert s.handle(Arrival(requests=(request("urgent", 5, arrival=1.001, slo=0.5),)), 1.001) == ()
