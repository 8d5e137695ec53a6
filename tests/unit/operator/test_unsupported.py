"""What a service may ask for and does not get yet is refused by its field."""

from __future__ import annotations

from typing import Any

import pytest

from flowprefill_crd import parse_service
from flowprefill_operator.plan import plan
from flowprefill_operator.settings import PlanSettings
from flowprefill_operator.unsupported import lost_container, unsupported
from support.services import MINIMAL_SPEC, document, merged


@pytest.mark.parametrize(
    ("changed", "fields"),
    [
        ({"prefill": {"nodes": 2}}, ["spec.prefill.nodes is 2"]),
        ({"decode": {"nodes": 3}}, ["spec.decode.nodes is 3"]),
        (
            {"prefill": {"nodes": 4}, "decode": {"nodes": 2}},
            ["spec.prefill.nodes is 4", "spec.decode.nodes is 2"],
        ),
        ({"prefill": {"nodes": 2}, "mode": "Colocated"}, ["spec.prefill.nodes is 2"]),
    ],
    ids=str,
)
def test_a_role_that_spans_nodes_is_refused_by_its_field(changed: dict[str, Any], fields: list[str]) -> None:
    found = unsupported(parse_service(document(merged(MINIMAL_SPEC, changed))))
    assert found is not None
    reason, message = found
    assert reason == "MultiNodeUnsupported"
    assert [field in message for field in fields] == [True] * len(fields)
    assert message.endswith("use 1")


def test_a_profiling_job_for_vllm_which_has_none_is_refused_before_its_pods_wait_for_it() -> None:
    job = {"scheduling": {"predictor": {"profilingJob": True}}}
    found = unsupported(parse_service(document(merged(MINIMAL_SPEC, job | {"engine": {"type": "vllm"}}))))
    assert found is not None
    reason, message = found
    assert reason == "ProfilingJobUnsupported"
    assert message.startswith("spec.scheduling.predictor.profilingJob is true and spec.engine.type is vllm")
    assert message.endswith("use false")


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"prefill": {"nodes": 1}},
        {"mode": "Colocated", "decode": {"nodes": 2}},
        {"scheduling": {"predictor": {"profilingJob": True}}},
        {"engine": {"type": "vllm"}, "scheduling": {"predictor": {"profileConfigMap": "measured"}}},
    ],
    ids=str,
)
def test_what_can_be_planned_is_taken(changed: dict[str, Any]) -> None:
    """Colocated services have no decode pods, so what they say of these means nothing."""
    assert unsupported(parse_service(document(merged(MINIMAL_SPEC, changed)))) is None


@pytest.mark.parametrize(
    ("patch", "lost"),
    [
        ({}, None),
        ({"containers": [{"name": "sidecar", "image": "x"}]}, None),
        ({"containers": [{"name": "prefill", "$patch": "delete"}]}, "prefill"),
        ({"$patch": "replace", "containers": [{"name": "main", "image": "x"}]}, "prefill"),
    ],
    ids=str,
)
def test_a_template_that_takes_the_role_s_own_container_away_is_told(
    patch: dict[str, Any], lost: str | None
) -> None:
    changed = {"prefill": {"podTemplate": {"spec": patch}}}
    objects = plan(parse_service(document(merged(MINIMAL_SPEC, changed))), PlanSettings())
    found = lost_container(objects)
    assert (found is None) == (lost is None)
    assert lost is None or f"one named {lost}" in str(found)
