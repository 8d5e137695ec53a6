from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowprefill.proxy.placement import (
    SETTLE_S,
    Outstanding,
    Pod,
    Rules,
    best_case_s,
    choose,
    choose_for_aged,
    num_cached_tokens,
    predict_s,
)
from flowprefill.request import Request
from flowprefill.scheduling.settings import PolicyName
from flowprefill.wire import PodState, TaskState

NOW_S = 100.0
PER_TOKEN = (0.0, 0.001, 0.0, 0.0)
RULES = Rules(
    policy="s-edf", batch_token_budget=1000, preemption="operator", max_suspended=2, coefficients=PER_TOKEN
)


def request(name: str = "r", tokens: int = 100, slo_s: float = 10.0, **fields: object) -> Request:
    defaults = {"arrival_s": NOW_S, "deadline_s": NOW_S + slo_s, "ttft_slo_s": slo_s}
    return Request(request_id=name, num_prompt_tokens=tokens, **{**defaults, **fields})


def state(running: TaskState | None = None, **fields: object) -> PodState:
    return PodState(sequence=1, role="prefill", revision="r1", ready=True, running=running, **fields)


def task(tokens: int, remaining_s: float, deadline_in_s: float, feasible: bool = True) -> TaskState:
    return TaskState(
        num_tokens=tokens, remaining_s=remaining_s, deadline_in_s=deadline_in_s, feasible=feasible
    )


def pod(name: str = "p", held: list[Request] | None = None, age_s: float = 1.0, **fields: object) -> Pod:
    outstanding = {
        r.request_id: Outstanding(
            request=r,
            num_tokens=r.num_prompt_tokens,
            predicted_s=0.001 * r.num_prompt_tokens,
            dispatched_s=NOW_S - age_s,
        )
        for r in held or []
    }
    defaults = {"state": state(), "state_at_s": NOW_S, "coefficients": PER_TOKEN}
    return Pod(name=name, revision="r1", outstanding=outstanding, **{**defaults, **fields})


def kind(request_: Request, *pods: Pod, rules: Rules = RULES) -> str | None:
    choice = choose(request_, pods, rules, NOW_S)
    return None if choice is None else choice.kind


def test_an_idle_pod_takes_a_prompt_of_any_length():
    assert kind(request(tokens=50_000), pod()) == "idle"


def test_an_urgent_request_goes_to_a_pod_whose_running_task_it_would_preempt():
    document = request("doc", tokens=5000, slo_s=60)
    busy = pod(held=[document], state=state(task(5000, 5.0, 60.0)))
    assert kind(request(slo_s=1.0), busy) == "preempt"
    assert kind(request(tokens=5000, slo_s=90.0), busy) is None


@pytest.mark.parametrize(
    "rules",
    [
        Rules(policy="s-edf", batch_token_budget=1000, preemption="none", max_suspended=2),
        Rules(policy="fcfs", batch_token_budget=1000, preemption="operator", max_suspended=2),
        Rules(policy="s-edf", batch_token_budget=1000, preemption="operator", max_suspended=0),
    ],
)
def test_without_preemption_a_long_prompt_waits_for_the_pod(rules):
    document = request("doc", tokens=5000, slo_s=60, arrival_s=NOW_S - 1)
    busy = pod(held=[document], state=state(task(5000, 5.0, 60.0)))
    assert kind(request(tokens=1500, slo_s=3.0), busy, rules=rules) is None
    assert kind(request(tokens=500, slo_s=3.0), busy, rules=rules) == "ahead"


def test_no_preemption_once_the_pod_holds_as_many_suspended_tasks_as_it_may():
    suspended = (task(3000, 3.0, 60.0), task(4000, 3.0, 60.0))
    busy = pod(
        held=[request("doc", tokens=9000, slo_s=60)],
        state=state(task(2000, 2.0, 60.0), suspended=suspended),
    )
    assert kind(request(tokens=1500, slo_s=3.0), busy) is None


def test_work_sent_ahead_stays_within_one_batch_budget():
    running = request("running", tokens=300, slo_s=1.0)
    waiting = request("waiting", tokens=600, slo_s=2.0)
    busy = pod(
        held=[running, waiting],
        state=state(task(300, 0.3, 1.0), waiting=1, waiting_s=0.6, waiting_tokens=600),
    )
    assert kind(request(tokens=400, slo_s=5.0), busy) == "ahead"
    assert kind(request(tokens=401, slo_s=5.0), busy) is None


def test_a_full_window_does_not_keep_a_request_from_preempting():
    running = request("running", tokens=5000, slo_s=60.0)
    patient = request("patient", tokens=900, slo_s=90.0)
    busy = pod(
        held=[running, patient],
        state=state(task(5000, 5.0, 60.0), waiting=1, waiting_s=0.9, waiting_tokens=900),
    )
    assert kind(request(tokens=900, slo_s=5.0), busy) == "preempt"
    assert kind(request(tokens=900, slo_s=99.0), busy) is None


def test_a_second_urgent_request_waits_for_the_first_or_joins_its_batch():
    document = request("doc", tokens=5000, slo_s=60.0)
    busy = pod(held=[document], state=state(task(5000, 5.0, 60.0), waiting_tokens=0))
    first = request("first", tokens=600, slo_s=1.0)
    busy.outstanding["first"] = Outstanding(
        request=first, num_tokens=600, predicted_s=0.6, dispatched_s=NOW_S - 0.001
    )
    assert kind(request(tokens=401, slo_s=2.0), busy) is None
    assert kind(request(tokens=400, slo_s=2.0), busy) == "ahead"
    assert kind(request(tokens=600, slo_s=0.8), busy) == "preempt"


def test_waiting_tokens_are_worked_out_for_pods_that_do_not_say():
    running = request("running", tokens=300, slo_s=1.0)
    waiting = request("waiting", tokens=600, slo_s=2.0)
    busy = pod(held=[running, waiting], state=state(task(300, 0.3, 1.0), waiting=1, waiting_s=0.6))
    assert kind(request(tokens=400, slo_s=5.0), busy) == "ahead"
    assert kind(request(tokens=401, slo_s=5.0), busy) is None


def test_several_proxies_share_the_window():
    running = request("running", tokens=300, slo_s=1.0)
    busy = pod(held=[running], state=state(task(300, 0.3, 1.0), waiting_tokens=0))
    three = Rules(
        policy="s-edf",
        batch_token_budget=1000,
        preemption="operator",
        max_suspended=2,
        num_proxies=3,
        coefficients=PER_TOKEN,
    )
    assert kind(request(tokens=333, slo_s=5.0), busy, rules=three) == "ahead"
    assert kind(request(tokens=334, slo_s=5.0), busy, rules=three) is None


def test_a_request_the_pod_has_not_reported_yet_counts_as_waiting():
    just_sent = request("sent", tokens=900, slo_s=1.0)
    seems_idle = pod(held=[just_sent], age_s=SETTLE_S / 2, state_at_s=NOW_S)
    assert kind(request(tokens=900, slo_s=5.0), seems_idle) is None
    assert kind(request(tokens=100, slo_s=5.0), seems_idle) == "ahead"
    settled = pod(held=[just_sent], age_s=2 * SETTLE_S, state_at_s=NOW_S)
    assert kind(request(tokens=900, slo_s=5.0), settled) == "idle"


def test_a_pod_about_to_be_free_gets_the_next_prompt_of_any_length():
    running = request("running", tokens=3000, slo_s=1.0)
    almost = pod(held=[running], state=state(task(3000, 0.01, 1.0), waiting_tokens=0))
    assert kind(request(tokens=5000, slo_s=5.0), almost) == "ahead"


def test_a_pod_without_enough_free_kv_gets_nothing_more():
    running = request("running", tokens=300, slo_s=60.0)
    fields = {"kv_blocks": 100, "block_size": 16}
    full = pod(held=[running], state=state(task(300, 0.3, 60.0), kv_blocks_free=6, **fields))
    assert kind(request(tokens=97, slo_s=1.0), full) is None
    assert kind(request(tokens=96, slo_s=1.0), full) == "preempt"


def test_draining_and_unready_pods_get_nothing():
    draining = pod(state=state(draining=True))
    unready = pod(state=PodState(sequence=1, role="prefill", revision="r1", ready=False))
    assert kind(request(), draining, unready) is None


def test_a_held_prefix_reduces_the_predicted_work_and_attracts_the_request():
    hashes = tuple(range(1, 7))
    wanted = request(tokens=100, prefix_hashes=hashes)
    warm = pod("warm", cached=frozenset(hashes[:4]))
    cold = pod("a-cold")
    assert num_cached_tokens(wanted, warm) == 64
    choice = choose(wanted, [cold, warm], RULES, NOW_S)
    assert (choice.pod, choice.num_new_tokens) == ("warm", 36)
    assert choice.work_s == pytest.approx(0.036)


def test_a_fully_cached_prompt_still_computes_its_last_token():
    wanted = request(tokens=64, prefix_hashes=(1, 2, 3, 4))
    assert num_cached_tokens(wanted, pod(cached=frozenset((1, 2, 3, 4)))) == 48


def test_a_gap_in_the_prefix_ends_it():
    wanted = request(tokens=100, prefix_hashes=(1, 2, 3))
    assert num_cached_tokens(wanted, pod(cached=frozenset((1, 3)))) == 16


def test_an_idle_pod_is_taken_before_one_where_a_task_would_be_preempted():
    busy = pod("a", held=[request("doc", tokens=5000, slo_s=60)], state=state(task(5000, 5.0, 60.0)))
    assert choose(request(slo_s=1.0), [busy, pod("b")], RULES, NOW_S).pod == "b"


def test_the_newest_revision_is_taken_while_it_meets_the_deadline():
    old, new = pod("a", rank=1), pod("b", rank=0)
    assert choose(request(), [old, new], RULES, NOW_S).pod == "b"
    busy_new = pod(
        "b",
        rank=0,
        held=[request("run", tokens=900, slo_s=0.5)],
        state=state(task(900, 0.9, 0.5), waiting_tokens=0),
    )
    fixed = Rules(policy="s-edf", batch_token_budget=1000, preemption="none", max_suspended=0)
    assert choose(request(slo_s=0.5), [old, busy_new], fixed, NOW_S).pod == "a"
    assert choose(request(slo_s=5.0), [old, busy_new], fixed, NOW_S).pod == "b"


def test_pods_without_a_stream_get_the_least_outstanding_work_within_two_budgets():
    def stock(name: str, *tokens: int) -> Pod:
        held = [request(f"{name}{i}", tokens=n) for i, n in enumerate(tokens)]
        return pod(name, held=held, state=None)

    assert choose(request(), [stock("a", 900), stock("b", 800)], RULES, NOW_S).pod == "b"
    assert kind(request(tokens=100), stock("a", 1900)) == "stateless"
    assert kind(request(tokens=101), stock("a", 1900)) is None
    assert kind(request(tokens=9000), stock("a")) == "stateless"


def test_an_aged_request_goes_to_the_pod_with_the_least_work_whatever_runs_there():
    busy = pod("a", held=[request("x", tokens=500)], state=state(task(500, 0.5, 1.0)))
    busier = pod("b", held=[request("y", tokens=900)], state=state(task(900, 0.9, 1.0)))
    assert choose_for_aged(request(tokens=9000), [busier, busy], RULES).pod == "a"
    assert choose_for_aged(request(), [pod(state=state(draining=True))], RULES) is None


def test_prediction_is_the_polynomial_and_nothing_costs_nothing():
    assert predict_s((0.01, 0.001, 1e-6, 2e-6), 100, 50) == pytest.approx(0.01 + 0.1 + 0.01 + 0.01)
    assert predict_s((0.01, 0.001, 0.0, 0.0), 0, 50) == 0.0


def test_the_best_case_is_the_fastest_pod_doing_nothing_else():
    slow = pod("a", coefficients=(0.0, 0.01, 0.0, 0.0))
    assert best_case_s(request(tokens=100), [slow, pod("b")], RULES) == pytest.approx(0.1)
    assert best_case_s(request(), [], RULES) is None


policies: list[PolicyName] = ["fcfs", "edf", "d-edf", "s-edf", "srpt", "moore-hodgson"]


@given(
    policy=st.sampled_from(policies),
    sizes=st.lists(st.tuples(st.integers(1, 1500), st.floats(0.1, 100.0)), max_size=30),
)
def test_a_busy_pod_never_holds_more_than_its_window_beyond_what_runs(policy, sizes):
    """Send whatever fits, one by one: all that waits at the pod is at most one batch budget, in any order."""
    rules = Rules(
        policy=policy, batch_token_budget=1000, preemption="none", max_suspended=0, coefficients=PER_TOKEN
    )
    running = request("running", tokens=300, slo_s=1.0, arrival_s=0.0)
    busy = pod(held=[running], state=state(task(300, 0.3, 1.0), waiting_tokens=0))
    waiting = 0
    for index, (tokens, slo_s) in enumerate(sizes):
        one = request(f"r{index}", tokens=tokens, slo_s=slo_s, arrival_s=NOW_S + index)
        choice = choose(one, [busy], rules, NOW_S)
        assert (choice is not None) == (waiting + tokens <= 1000)
        if choice is None:
            continue
        assert choice.kind == "ahead"
        waiting += tokens
        busy.outstanding[one.request_id] = Outstanding(
            request=one, num_tokens=tokens, predicted_s=0.001 * tokens, dispatched_s=NOW_S
        )


def test_a_pod_that_drains_takes_nothing_unless_it_is_the_last_resort():
    draining = state(draining=True)
    assert kind(request(), pod(state=draining)) is None
    assert kind(request(), pod(state=draining, leaving=True)) == "idle"
    assert choose_for_aged(request(), [pod(state=draining)], RULES) is None
    assert choose_for_aged(request(), [pod(state=draining, leaving=True)], RULES) is not None
