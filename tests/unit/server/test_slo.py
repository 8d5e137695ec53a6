"""What a pod makes of the budget that the proxy sends."""

from __future__ import annotations

from typing import Any

import pytest

from flowprefill.metrics.scheduler import OTHER
from flowprefill.server.slo import decode_max_tokens, slo_of
from support.pods import live_config

LIVE = live_config()


def test_the_proxys_numbers_are_used() -> None:
    slo = slo_of({"ttft_slo": 0.21, "ttft_target": 0.3, "slo_class": "document"}, LIVE)
    assert (slo.budget_s, slo.ttft_s, slo.slo_class) == (0.21, 0.3, "document")


def test_without_numbers_the_class_decides() -> None:
    assert slo_of({}, LIVE).slo_class == "chat"
    assert slo_of({}, LIVE).budget_s == 0.5
    assert slo_of({"slo_class": "document"}, LIVE).budget_s == 5.0


def test_a_late_request_has_a_negative_budget() -> None:
    assert slo_of({"ttft_slo": -3.5, "ttft_target": 0.5}, LIVE).budget_s == -3.5


@pytest.mark.parametrize("bad", ["0.5", "", None, True, [], {}, float("nan"), float("inf"), -float("inf")])
def test_a_bad_value_falls_through(bad: Any) -> None:
    slo = slo_of({"ttft_slo": bad, "ttft_target": bad}, LIVE)
    assert (slo.budget_s, slo.ttft_s) == (0.5, 0.5)


@pytest.mark.parametrize(("given", "kept"), [(1e300, 86400.0), (10**30, 86400.0), (-1e300, -86400.0)])
def test_a_huge_value_is_clamped(given: Any, kept: float) -> None:
    assert slo_of({"ttft_slo": given}, LIVE).budget_s == kept


@pytest.mark.parametrize("bad", [0, -1, 1e-9])
def test_a_target_is_positive(bad: Any) -> None:
    assert slo_of({"ttft_target": bad}, LIVE).ttft_s > 0


def test_an_unknown_class_is_other_with_the_defaults_numbers() -> None:
    for name in ("nobody", 3, ["chat"]):
        slo = slo_of({"slo_class": name}, LIVE)
        assert (slo.slo_class, slo.ttft_s) == (OTHER, 0.5)


@pytest.mark.parametrize(
    ("given", "read"), [(7, 7), (0, None), (-1, None), (True, None), ("7", None), (1.5, None)]
)
def test_the_clients_own_limit(given: Any, read: int | None) -> None:
    assert decode_max_tokens({"decode_max_tokens": given}) == read
