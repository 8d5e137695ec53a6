"""Whatever the text, parsing gives a service or an InvalidService."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowprefill_crd import (
    FlowPrefillService,
    InvalidConfig,
    InvalidService,
    LiveConfig,
    PodConfig,
    parse_service,
)
from support.services import changes, document, nodes, spec_schema, with_value

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
PATHS = [path for path, _ in nodes(spec_schema())]
SPECS = [after for _, _, _, after in changes()]


def outcome(body: Any) -> FlowPrefillService | None:
    """The service, or None when the error is ours and has something to say."""
    try:
        return parse_service(body)
    except InvalidService as error:
        problems = error.problems
    assert problems
    assert all(problem.message for problem in problems)
    return None


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.sampled_from(SPECS), st.sampled_from(PATHS), VALUES)
def test_a_spec_with_any_value_anywhere_is_accepted_or_refused_in_our_words(
    spec: dict[str, Any], path: tuple[str | int, ...], value: Any
) -> None:
    try:
        changed = with_value(spec, path, value)
    except (TypeError, ValueError):  # the path leads through a scalar of this spec
        return
    service = outcome(document(changed))
    if service is not None:
        assert parse_service(service.model_dump(mode="json", by_alias=True, exclude_none=True)) == service


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_refused_in_our_words(text: str) -> None:
    assert outcome(text) is None


@settings(derandomize=True, max_examples=100, deadline=None)
@given(VALUES)
def test_any_json_for_the_pods_is_refused_in_our_words(value: Any) -> None:
    for document_type in (LiveConfig, PodConfig):
        with pytest.raises(InvalidConfig, match="invalid configuration:\n  "):
            document_type.from_json(json.dumps(value))
