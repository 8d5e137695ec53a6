"""What holds for the objects of every service that the API accepts."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowprefill_crd import FlowPrefillService, InvalidService, parse_service
from flowprefill_operator.plan import plan
from flowprefill_operator.settings import PlanSettings
from support.services import MINIMAL_SPEC, Spec, changes, document, merged

_LABEL = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)
# RFC 1123 subdomains, as the API server accepts them for the name of a custom resource.
NAMES = st.lists(_LABEL, min_size=1, max_size=8).map(".".join).filter(lambda name: len(name) <= 253)
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")

CHANGES = [(before, after) for _, _, before, after in changes()]
"""Every field of the spec, each with a spec that has another value there than its default."""
SHAPES: list[Spec] = [
    {},
    {"mode": "Colocated"},
    {"engine": {"type": "vllm"}},
    {"model": {"uri": "hf://org/name"}},
    {"model": {"uri": "pvc://claim/model"}},
    {"scheduling": {"predictor": {"profilingJob": True}}},
    {"proxy": {"httpRoute": {"parentRefs": [{"name": "gateway"}]}}},
    {"prefill": {"autoscaling": {"maxReplicas": 4}}, "proxy": {"replicas": 3}},
    {"prefill": {"podTemplate": {"metadata": {"labels": {"flowprefill.io/role": "stolen"}}}}},
]
SETTINGS = [
    PlanSettings(),
    PlanSettings(network_policy=False),
    PlanSettings(
        monitoring_from=({"namespaceSelector": {}},),
        operator_namespace="flowprefill",
        image_pull_secrets=("registry",),
    ),
]


@st.composite
def services(draw: st.DrawFn) -> FlowPrefillService:
    """A service of any name whose spec has several fields changed, as far as the API accepts them together."""
    spec: Spec = MINIMAL_SPEC
    for change in draw(st.lists(st.sampled_from(SHAPES), max_size=3)):
        spec = _if_valid(spec, change)
    for _, after in draw(st.lists(st.sampled_from(CHANGES), max_size=4)):
        spec = _if_valid(spec, after)
    seconds = {
        name: draw(st.integers(0, 300)) for name in ("preStopSeconds", "lameDuckSeconds", "drainSeconds")
    }
    spec = _if_valid(spec, {"termination": seconds})
    metadata = {"name": draw(NAMES), "namespace": draw(_LABEL), "uid": draw(st.sampled_from(["", "u-1"]))}
    return parse_service(document(spec, **metadata))


def _if_valid(spec: Spec, change: Spec) -> Spec:
    both: Spec = merged(spec, change)
    try:
        parse_service(document(both))
    except InvalidService:
        return spec
    return both


PLANS = given(service=services(), how=st.sampled_from(SETTINGS))
FEW = settings(max_examples=60, deadline=None)
"""As many as a second or two allows."""


@FEW
@PLANS
def test_names_are_dns_1035_labels_of_at_most_50_characters_and_no_two_objects_share_one(
    service: FlowPrefillService, how: PlanSettings
) -> None:
    objects = planned(service, how)
    for item in objects:
        assert DNS_1035.fullmatch(item["metadata"]["name"])
        assert len(item["metadata"]["name"]) <= 50
        assert item["metadata"]["namespace"] == service.metadata.namespace
    used = Counter((item["apiVersion"], item["kind"], item["metadata"]["name"]) for item in objects)
    assert {key for key, times in used.items() if times > 1} == set()


@FEW
@PLANS
def test_labels_are_valid_and_lead_from_every_object_and_pod_to_the_service(
    service: FlowPrefillService, how: PlanSettings
) -> None:
    objects = planned(service, how)
    metadata = [item["metadata"] for item in objects]
    metadata += [template["metadata"] for _, template in templates(objects)]
    assert len({meta["labels"]["flowprefill.io/service"] for meta in metadata}) == 1
    for meta in metadata:
        for value in meta["labels"].values():
            assert LABEL_VALUE.fullmatch(value)
            assert len(value) <= 63
    for item in objects:
        assert item["metadata"]["labels"].get("flowprefill.io/owner-uid", "") == service.metadata.uid


@FEW
@PLANS
def test_each_deployment_selects_its_own_pods_and_no_other_ones(
    service: FlowPrefillService, how: PlanSettings
) -> None:
    objects = planned(service, how)
    pods = templates(objects)
    for item, template in pods:
        if item["kind"] == "Deployment":
            selector = item["spec"]["selector"]["matchLabels"]
            chosen = [name for name, pod in pods if selector.items() <= pod["metadata"]["labels"].items()]
            assert chosen == [item]
            assert selector.items() <= template["metadata"]["labels"].items()


@FEW
@PLANS
def test_a_pod_has_time_for_every_step_of_stopping(service: FlowPrefillService, how: PlanSettings) -> None:
    steps = service.spec.termination
    for item, template in templates(planned(service, how)):
        if item["kind"] != "Deployment":
            continue
        role = template["metadata"]["labels"]["flowprefill.io/role"]
        needed = steps.pre_stop_seconds + steps.lame_duck_seconds + steps.drain_seconds
        if role == "prefill":
            needed += service.spec.kv_transfer.lease_seconds
        assert template["spec"]["terminationGracePeriodSeconds"] > needed


@FEW
@PLANS
def test_what_pods_refer_to_is_planned_before_them(service: FlowPrefillService, how: PlanSettings) -> None:
    """Except for what the user or the profiling Job brings."""
    objects = planned(service, how)
    brought = {service.spec.scheduling.predictor.profile_config_map}
    brought |= {item["metadata"]["name"] for item in objects if item["kind"] == "Job"}
    before: set[tuple[str, str]] = set()
    for item in objects:
        before.add((item["kind"], item["metadata"]["name"]))
        for _, template in templates([item]):
            account = template["spec"].get("serviceAccountName")
            assert account is None or ("ServiceAccount", account) in before
            for volume in template["spec"]["volumes"]:
                name = volume.get("configMap", {}).get("name")
                assert name is None or name in brought or ("ConfigMap", name) in before


@FEW
@PLANS
def test_a_plan_is_json_and_the_same_each_time(service: FlowPrefillService, how: PlanSettings) -> None:
    again = parse_service(json.loads(service.model_dump_json(by_alias=True, exclude_none=True)))
    assert json.dumps(plan(service, how)) == json.dumps(plan(again, how))


@settings(max_examples=40, deadline=None)
@given(one=NAMES, other=NAMES)
def test_two_services_of_one_namespace_share_no_object(one: str, other: str) -> None:
    if one == other:
        return
    kinds = [
        {
            (item["kind"], item["metadata"]["name"])
            for item in planned(parse_service(document(name=name)), PlanSettings())
        }
        for name in (one, other)
    ]
    assert not kinds[0] & kinds[1]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_shapes_are_valid_so_that_they_are_tried(shape: Spec) -> None:
    parse_service(document(merged(MINIMAL_SPEC, shape)))


def planned(service: FlowPrefillService, how: PlanSettings) -> list[dict[str, Any]]:
    return [dict(item) for item in plan(service, how)]


def templates(objects: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Every pod template with the object that it belongs to."""
    return [(item, item["spec"]["template"]) for item in objects if item["kind"] in ("Deployment", "Job")]
