from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowprefill.proxy.slo import REASONS, SOURCES, Slo, SloClass, SloClasses, resolve

CHAT = SloClass(name="chat", ttft_s=1.0, min_ttft_s=0.5, max_ttft_s=4.0)
BATCH = SloClass(name="batch", ttft_s=20.0, min_ttft_s=10.0, max_ttft_s=80.0)
KNOWN = SloClasses(
    classes={"chat": CHAT, "batch": BATCH},
    default="chat",
    service_tiers={"priority": "chat", "flex": "batch"},
)


def slo(*headers: tuple[str, str], **body: object) -> Slo:
    return resolve(headers, body, KNOWN)


def test_a_request_that_says_nothing_gets_the_default_class():
    assert slo() == Slo(slo_class=CHAT, ttft_s=1.0)


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        # the first rule that says something valid wins
        ([("x-flowprefill-slo-class", "batch"), ("x-slo-ttft-ms", "700")], {}, ("batch", 20.0)),
        ([("x-flowprefill-slo-class", "batch")], {"service_tier": "priority"}, ("batch", 20.0)),
        ([("x-llm-d-slo-ttft-ms", "700"), ("x-slo-ttft-ms", "900")], {}, ("chat", 0.7)),
        ([("x-slo-ttft-ms", "900")], {"vllm_xargs": {"ttft_slo": 0.6}}, ("chat", 0.9)),
        ([], {"vllm_xargs": {"ttft_slo": 0.6}}, ("chat", 0.6)),
        ([], {"vllm_xargs": {"ttft_slo": "0.6"}}, ("chat", 0.6)),
        ([("x-llm-d-inference-objective", "batch")], {"service_tier": "priority"}, ("batch", 20.0)),
        ([("x-gateway-inference-objective", "batch")], {}, ("batch", 20.0)),
        ([], {"service_tier": "flex"}, ("batch", 20.0)),
        # a bare number keeps the class of the later rules, within that class's bounds
        ([("x-slo-ttft-ms", "30000")], {"service_tier": "flex"}, ("batch", 30.0)),
        ([("x-slo-ttft-ms", "1")], {"service_tier": "flex"}, ("batch", 10.0)),
        ([("x-slo-ttft-ms", "1")], {}, ("chat", 0.5)),
        ([("x-slo-ttft-ms", "9223372036854775807")], {}, ("chat", 4.0)),
        ([("x-slo-ttft-ms", " 500 ")], {}, ("chat", 0.5)),
        ([("x-slo-ttft-ms", "750.5")], {}, ("chat", 0.7505)),
        # what is wrong falls through to the next rule
        ([("x-flowprefill-slo-class", "nope"), ("x-slo-ttft-ms", "700")], {}, ("chat", 0.7)),
        ([("x-llm-d-slo-ttft-ms", "abc"), ("x-slo-ttft-ms", "700")], {}, ("chat", 0.7)),
        ([("x-slo-ttft-ms", "-1")], {"vllm_xargs": {"ttft_slo": 0.6}}, ("chat", 0.6)),
    ],
)
def test_the_first_valid_rule_wins(headers, body, expected):
    decided = resolve(headers, body, KNOWN)
    assert (decided.slo_class.name, decided.ttft_s) == (expected[0], pytest.approx(expected[1]))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("abc", "not_a_number"),
        ("-1", "not_positive"),
        ("0", "not_positive"),
        ("0.0", "not_positive"),
        ("1e3", "not_a_number"),
        ("nan", "not_a_number"),
        ("inf", "not_a_number"),
        ("0x10", "not_a_number"),
        ("1_000", "not_a_number"),
        ("\u0665\u0660\u0660", "not_a_number"),  # Arabic-Indic digits: int() would take them
        ("9" * 400, "out_of_range"),
    ],
)
def test_a_header_that_is_no_number_is_counted_and_gives_the_default(value, reason):
    assert slo(("x-llm-d-slo-ttft-ms", value)) == Slo(
        slo_class=CHAT, ttft_s=1.0, invalid=(("llmd_ttft_header", reason),)
    )


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, "out_of_range"),
        (math.inf, "out_of_range"),
        (-math.inf, "out_of_range"),
        (10**400, "out_of_range"),
        (True, "not_a_number"),
        (None, "not_a_number"),
        ([1], "not_a_number"),
        (-2, "not_positive"),
        (0, "not_positive"),
    ],
)
def test_a_body_value_that_is_no_number_is_counted_and_gives_the_default(value, reason):
    assert slo(vllm_xargs={"ttft_slo": value}) == Slo(
        slo_class=CHAT, ttft_s=1.0, invalid=(("xargs", reason),)
    )


def test_copies_of_a_header_that_disagree_are_refused_and_equal_ones_are_one():
    header = "x-slo-ttft-ms"
    assert slo((header, "600"), (header, "700")).invalid == (("ttft_header", "conflicting"),)
    assert slo((header, "600"), (header, " 600")).ttft_s == 0.6


def test_an_unknown_service_tier_is_counted_unless_it_means_no_preference():
    assert slo(service_tier="gold").invalid == (("service_tier", "unknown"),)
    assert slo(service_tier=7).invalid == (("service_tier", "unknown"),)
    assert slo(service_tier="auto").invalid == ()


def test_a_clients_arrival_changes_nothing():
    assert slo(vllm_xargs={"arrival": 123.4, "ttft_slo": 0.7}) == slo(vllm_xargs={"ttft_slo": 0.7})


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
header_names = st.sampled_from(
    [
        "x-flowprefill-slo-class",
        "x-llm-d-slo-ttft-ms",
        "x-slo-ttft-ms",
        "x-llm-d-inference-objective",
        "x-gateway-inference-objective",
    ]
)


@given(
    headers=st.lists(st.tuples(header_names, st.text(max_size=30))),
    xargs=anything | st.fixed_dictionaries({"ttft_slo": anything}),
    tier=anything,
)
def test_whatever_a_client_sends_the_target_stays_within_its_class_and_labels_stay_closed(
    headers, xargs, tier
):
    decided = resolve(headers, {"vllm_xargs": xargs, "service_tier": tier}, KNOWN)
    assert decided.slo_class.min_ttft_s <= decided.ttft_s <= decided.slo_class.max_ttft_s
    assert {source for source, _ in decided.invalid} <= set(SOURCES)
    assert {reason for _, reason in decided.invalid} <= set(REASONS)
