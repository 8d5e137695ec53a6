"""Names of owned objects are valid and distinct for every name a service may have."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from flowprefill_operator.names import MAX_NAME, child_name, label_value

# RFC 1123 subdomains, as the API server accepts them for the name of a custom resource.
_LABEL = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)
SERVICE_NAMES = st.lists(_LABEL, min_size=1, max_size=8).map(".".join).filter(lambda name: len(name) <= 253)
SUFFIXES = st.sampled_from(
    [("prefill", "0123456789"), ("colocated", "0123456789"), ("proxy",), ("live",), ()]
)

# RFC 1035, which Services keep to: a letter first.
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")


@given(SERVICE_NAMES, SUFFIXES)
def test_a_child_name_is_a_dns_1035_label_of_at_most_50_characters(
    name: str, suffixes: tuple[str, ...]
) -> None:
    child = child_name(name, *suffixes)
    assert DNS_1035.fullmatch(child)
    assert len(child) <= 50 == MAX_NAME


@given(SERVICE_NAMES, SERVICE_NAMES, SUFFIXES)
def test_two_services_never_share_a_child(one: str, other: str, suffixes: tuple[str, ...]) -> None:
    assert (child_name(one, *suffixes) == child_name(other, *suffixes)) == (one == other)


@given(SERVICE_NAMES)
def test_a_label_value_is_valid_and_at_most_63_characters(name: str) -> None:
    value = label_value(name)
    assert LABEL_VALUE.fullmatch(value)
    assert len(value) <= 63


def test_a_name_that_fits_stays_readable() -> None:
    assert child_name("chat", "prefill", "0123456789") == "chat-prefill-0123456789"


def test_names_that_differ_only_behind_the_cut_or_in_dots_stay_apart() -> None:
    long = "x" * 60
    assert child_name(long + "a", "proxy") != child_name(long + "b", "proxy")
    assert child_name("a.b", "proxy") != child_name("a-b", "proxy")


def test_a_name_that_starts_with_a_digit_gets_a_letter_first() -> None:
    assert child_name("7b", "proxy").startswith("s7b-")
