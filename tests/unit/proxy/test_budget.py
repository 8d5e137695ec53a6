from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from flowprefill.proxy.budget import FLOOR_S, FollowUp, SlidingQuantile, remaining_budget_s


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=80), st.integers(1, 20))
def test_the_quantile_is_the_nearest_rank_of_the_last_observations(values, window):
    quantile = SlidingQuantile(quantile=0.9, window=window)
    for value in values:
        quantile.observe(value)
    recent = sorted(values[-window:])
    assert quantile.value() == recent[math.ceil(round(0.9 * len(recent), 6)) - 1]


def test_a_new_pod_takes_the_prior_then_all_pods_then_its_own_samples():
    follow_up = FollowUp(prior_s=0.05, min_samples=3)
    assert follow_up.p90_s("a") == 0.05
    for _ in range(3):
        follow_up.observe("b", 0.2)
    assert follow_up.p90_s("a") == 0.2
    for _ in range(3):
        follow_up.observe("a", 0.4)
    assert follow_up.p90_s("a") == 0.4
    assert follow_up.p90_s("b") == 0.2
    follow_up.forget("b")
    assert follow_up.p90_s("b") == 0.4


def test_what_follows_is_never_taken_to_be_nothing():
    follow_up = FollowUp(min_samples=1)
    follow_up.observe("a", 0.0)
    assert follow_up.p90_s("a") == FLOOR_S


def test_the_budget_is_what_is_left_and_negative_for_a_late_request():
    assert remaining_budget_s(target_s=2.0, spent_s=0.5, follow_s=0.25) == 1.25
    assert remaining_budget_s(target_s=2.0, spent_s=3.0, follow_s=0.25) == -1.25
