"""The whole status: what is kept, what is absent, and that it always fits the CRD."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from flowprefill_crd import parse_service
from flowprefill_crd.crd import root_schema
from flowprefill_operator.apply import Applied, Failure
from flowprefill_operator.cluster.errors import Unavailable
from flowprefill_operator.kinds import CONFIG_MAPS
from flowprefill_operator.scene import scene
from flowprefill_operator.status.compute import as_json, status_of
from flowprefill_operator.status.invalid import invalid_status
from flowprefill_operator.status.view import Reports, View
from support.cluster_objects import pod_status, running, unschedulable, waiting
from support.services import MINIMAL_SPEC, Spec, document
from support.simulated_cluster import UID, SimulatedCluster

EARLIER, NOW = "2026-03-01T11:00:00Z", "2026-03-01T12:00:00Z"
OTHER: Spec = {"engine": {"kvCacheTokens": 4096}}


def view(cluster: SimulatedCluster, *, reports: Reports | None = None, **changes: Any) -> View:
    cluster.hear()
    now = scene(cluster.observed(), UID)
    said = Reports() if reports is None else reports
    return View(
        service=changes.pop("service", cluster.service),
        now=changes.pop("now", NOW),
        scene=now,
        goal=changes.pop("goal", cluster.goal()),
        applied=changes.pop("applied", Applied(writes=0, failures=())),
        reports=replace(said, proven=frozenset(cluster.proven)),
        **changes,
    )


def serving(changes: Spec | None = None) -> tuple[SimulatedCluster, str]:
    cluster = SimulatedCluster(1)
    revision = cluster.ask(changes)
    cluster.settle()
    return cluster, revision


def with_status(cluster: SimulatedCluster, status: dict[str, Any]) -> None:
    """The service as it is read again with a status."""
    body = cluster.service.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    cluster.service = parse_service(
        {**body, "apiVersion": "flowprefill.io/v1alpha1", "kind": "FlowPrefillService", "status": status}
    )


def problems(node: dict[str, Any], value: Any, path: str = "status") -> list[str]:
    """What an API server would refuse or drop: OpenAPI v3 as far as the status uses it."""
    types = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    if not isinstance(value, types[node["type"]]):
        return [f"{path}: {value!r} is no {node['type']}"]
    found = []
    if isinstance(value, dict):
        found += [f"{path}: lacks {name}" for name in node.get("required", ()) if name not in value]
        for name, child in value.items():
            if name not in node["properties"]:
                found.append(f"{path}.{name} is unknown")
            else:
                found += problems(node["properties"][name], child, f"{path}.{name}")
    elif isinstance(value, list):
        if len(value) > node["maxItems"]:
            found.append(f"{path}: {len(value)} items")
        for number, child in enumerate(value):
            found += problems(node["items"], child, f"{path}[{number}]")
    elif isinstance(value, str):
        if len(value) > node.get("maxLength", len(value)):
            found.append(f"{path}: {len(value)} characters")
        if "pattern" in node and re.search(node["pattern"], value) is None:
            found.append(f"{path}: {value!r} does not match {node['pattern']}")
        if "enum" in node and value not in node["enum"]:
            found.append(f"{path}: {value!r} is not one of {node['enum']}")
    elif isinstance(value, int) and not node.get("minimum", value) <= value <= node.get("maximum", value):
        found.append(f"{path}: {value} is out of range")
    return found


STATUS_SCHEMA: dict[str, Any] = root_schema()["properties"]["status"]


@pytest.mark.parametrize("seed", range(5))
def test_the_status_fits_the_schema_whatever_the_state_and_is_the_same_when_nothing_changes(
    seed: int,
) -> None:
    cluster = SimulatedCluster(seed)
    specs: list[Spec] = [
        {},
        OTHER,
        {"mode": "Colocated"},
        {"scheduling": {"predictor": {"profilingJob": True}}},
        {"prefill": {"autoscaling": {"maxReplicas": 3}}},
    ]
    states = (
        pod_status(waiting("ImagePullBackOff", "x" * 5000)),
        pod_status(running(), phase="Running"),
        unschedulable("no"),
    )
    status: dict[str, Any] = {}
    for _ in range(12):
        if cluster.rng.random() < 0.3 or not status:
            cluster.sick.add(cluster.ask(cluster.rng.choice(specs)))
        cluster.steps(15)
        for pod in cluster.pods.values():
            if cluster.rng.random() < 0.3:
                pod["status"] = cluster.rng.choice(states)
        counts = cluster.rng.choice((None, {"chat": (7, 3)}))
        shown = view(cluster, reports=Reports(attainment=counts, unproven="x"))
        status = as_json(status_of(shown))
        assert problems(STATUS_SCHEMA, status) == []
        with_status(cluster, status)
        later = replace(shown, service=cluster.service, now="2026-03-02T00:00:00Z")
        assert as_json(status_of(later)) == status


def test_the_check_above_finds_what_does_not_fit() -> None:
    bad = {"observedGeneration": "1", "conditions": [{"type": "Ready", "status": "Yes"}], "more": 1}
    assert len(problems(STATUS_SCHEMA, bad)) >= 4


def test_a_serving_service_tells_revision_url_roles_and_model() -> None:
    cluster, revision = serving({"prefill": {"replicas": 2}, "proxy": {"portApi": 8081}})
    status = as_json(status_of(view(cluster)))
    assert status["observedGeneration"] == 1
    assert status["revision"] == {"current": revision}
    assert status["url"] == "http://example-proxy.ns.svc:8081/v1"
    assert status["roles"] == {
        "prefill": {"replicas": 2, "readyReplicas": 2, "revision": revision, "summary": "2/2"},
        "decode": {"replicas": 1, "readyReplicas": 1, "revision": revision, "summary": "1/1"},
        "proxy": {"replicas": 1, "readyReplicas": 1, "revision": revision, "summary": "1/1"},
    }
    assert status["resolvedModel"]["uri"] == "embedded://tiny"
    assert {"loadingSince", "sloAttainment", "ttftSummary", "upgradeAvailable"}.isdisjoint(status)


def test_colocated_pods_are_told_as_prefill_pods() -> None:
    cluster, revision = serving({"mode": "Colocated"})
    roles = as_json(status_of(view(cluster)))["roles"]
    assert set(roles) == {"prefill", "proxy"}
    assert roles["prefill"]["revision"] == revision


def test_in_a_rollout_the_pods_of_the_revision_that_serves_are_counted() -> None:
    cluster, old = serving({"prefill": {"replicas": 2}})
    new = cluster.ask({"prefill": {"replicas": 2}, **OTHER})
    cluster.sick.add(new)
    cluster.settle()
    status = as_json(status_of(view(cluster)))
    assert status["revision"] == {"current": old, "updating": new}
    assert status["roles"]["prefill"] == {
        "replicas": 2,
        "readyReplicas": 2,
        "revision": old,
        "summary": "2/2",
    }


def test_before_the_first_revision_serves_there_is_none_that_is_current() -> None:
    cluster = SimulatedCluster(1)
    revision = cluster.ask()
    cluster.sick.add(revision)
    cluster.settle()
    assert as_json(status_of(view(cluster)))["revision"] == {"updating": revision}


def test_a_spec_that_is_refused_keeps_the_revision_that_serves() -> None:
    cluster, revision = serving()
    with_status(cluster, as_json(status_of(view(cluster))))
    shown = view(cluster, goal=None, applied=None, refusal=("MultiNodeUnsupported", "two nodes"))
    assert as_json(status_of(shown))["revision"] == {"current": revision}


def test_the_time_of_a_transition_stays_until_the_status_is_another() -> None:
    cluster = SimulatedCluster(1)
    revision = cluster.ask()
    cluster.sick.add(revision)
    cluster.settle()
    with_status(cluster, as_json(status_of(view(cluster, now=EARLIER))))
    # Another reason and message is no transition.
    cluster.members("prefill", revision)[0]["status"] = unschedulable("no room")
    status = status_of(view(cluster))
    found = {c.type: c for c in status.conditions}
    assert found["PrefillReady"].reason == "Unschedulable"
    assert {c.last_transition_time for c in status.conditions} == {EARLIER}
    with_status(cluster, as_json(status))
    cluster.sick.clear()
    cluster.settle()
    found = {c.type: c for c in status_of(view(cluster)).conditions}
    assert (found["PrefillReady"].status, found["PrefillReady"].last_transition_time) == ("True", NOW)
    assert (found["Accepted"].status, found["Accepted"].last_transition_time) == ("True", EARLIER)


def test_loading_since_is_when_the_first_of_the_pods_that_load_was_created() -> None:
    cluster = SimulatedCluster(1)
    revision = cluster.ask({"prefill": {"replicas": 2}})
    cluster.sick.add(revision)
    cluster.settle()
    first, second = cluster.members("prefill", revision)
    for pod, created in ((first, "2026-03-01T11:30:00Z"), (second, "2026-03-01T11:20:00Z")):
        pod["metadata"]["creationTimestamp"] = created
        pod["status"] = pod_status(running(), phase="Running")
    for pod in cluster.members("decode", revision):
        pod["metadata"]["creationTimestamp"] = "2026-03-01T09:00:00Z"  # waits for a node, loads nothing
        pod["status"] = unschedulable("no room")
    assert status_of(view(cluster)).loading_since == "2026-03-01T11:20:00Z"
    for pod in (first, second):
        pod["status"] = pod_status(running(ready=True), phase="Running", ready=True)
    assert status_of(view(cluster)).loading_since is None


@pytest.mark.parametrize(
    ("counts", "attainment"),
    [
        ((1000, 0), "100.0"),
        ((999, 1), "99.9"),
        ((2, 1), "66.7"),
        ((0, 4), "0.0"),
        ((0, 0), None),
    ],
)
def test_attainment_is_rounded_to_a_tenth_and_absent_without_traffic(
    counts: tuple[int, int], attainment: str | None
) -> None:
    cluster, _ = serving()
    status = as_json(status_of(view(cluster, reports=Reports(attainment={"chat": counts}))))
    chat, other = status["sloAttainment"]
    assert chat.get("attainment") == attainment
    assert (chat["name"], chat["ttftMilliseconds"], chat["windowSeconds"]) == ("chat", 1000, 3600)
    assert (other["name"], other.get("attainment")) == ("document", None)
    assert status.get("ttftSummary") == (None if attainment is None else f"chat {attainment}%")


def test_attainment_is_absent_while_no_proxy_can_be_reached() -> None:
    cluster, _ = serving()
    assert "sloAttainment" not in as_json(status_of(view(cluster, reports=Reports(attainment=None))))


def test_a_spec_that_is_refused_keeps_the_attainment_of_the_classes_that_are_in_effect() -> None:
    cluster, _ = serving()
    before = as_json(status_of(view(cluster, reports=Reports(attainment={"chat": (999, 1)}))))
    other = [{"name": "x", "ttftMilliseconds": 1, "objective": "90", "default": True}]
    cluster.ask({"sloClasses": other, "prefill": {"nodes": 2}})
    with_status(cluster, before)
    shown = view(
        cluster,
        goal=None,
        applied=None,
        refusal=("MultiNodeUnsupported", "two nodes"),
        reports=Reports(attainment={"chat": (1, 999)}),
    )
    status = as_json(status_of(shown))
    assert [entry["name"] for entry in status["sloAttainment"]] == ["chat", "document"]
    assert status["sloAttainment"] == before["sloAttainment"]
    assert status["ttftSummary"] == "chat 99.9%"


def test_the_summary_names_each_class_with_traffic() -> None:
    cluster, _ = serving()
    reports = Reports(attainment={"chat": (99, 1), "document": (1, 1), "gone": (5, 5)})
    assert status_of(view(cluster, reports=reports)).ttft_summary == "chat 99.0%, document 50.0%"


def test_long_messages_are_cut() -> None:
    cluster, _ = serving()
    error = Unavailable(
        verb="patch", resource="configmaps", status=500, reason="InternalError", message="x" * 9000
    )
    failed = Applied(writes=0, failures=(Failure(kind=CONFIG_MAPS, name="example-live", error=error),))
    for condition in status_of(view(cluster, applied=failed)).conditions:
        assert len(condition.message) <= 1024
    (told,) = [c for c in status_of(view(cluster, applied=failed)).conditions if c.type == "ObjectsApplied"]
    assert told.message.endswith("x...")


def invalid(status: dict[str, Any] | None, problem: str = "spec.model: is missing") -> dict[str, Any]:
    body = document(MINIMAL_SPEC, generation=4)
    if status is not None:
        body["status"] = status
    return invalid_status(body, problem, now=NOW)


def test_a_service_that_cannot_be_read_is_told_so_and_keeps_what_was_known() -> None:
    cluster, revision = serving()
    follow = Reports(generations=dict.fromkeys(cluster.pods, 1))
    before = as_json(status_of(view(cluster, now=EARLIER, reports=follow)))
    status = invalid(before)
    found = {c["type"]: c for c in status["conditions"]}
    assert problems(STATUS_SCHEMA, status) == []
    for name, value in (("Ready", "False"), ("Accepted", "False"), ("Stalled", "True")):
        assert (found[name]["status"], found[name]["reason"]) == (value, "InvalidSpec")
        assert (found[name]["observedGeneration"], found[name]["lastTransitionTime"]) == (4, NOW)
        assert found[name]["message"] == "spec.model: is missing"
    assert (found["Available"]["status"], found["Available"]["lastTransitionTime"]) == ("True", EARLIER)
    assert status["revision"] == {"current": revision}
    assert status["observedGeneration"] == 4
    # Told once: the same again is the same status.
    assert invalid(status) == status


def test_a_service_that_could_never_be_read_has_a_status_too() -> None:
    status = invalid(None, "x" * 9000)
    assert problems(STATUS_SCHEMA, status) == []
    assert [c["type"] for c in status["conditions"]] == ["Ready", "Accepted", "Stalled"]
    assert {len(c["message"]) for c in status["conditions"]} == {1024}


def test_what_was_on_its_way_is_not_any_more() -> None:
    old = {"type": "Reconciling", "status": "True", "reason": "PodsStarting", "lastTransitionTime": EARLIER}
    status = invalid({"conditions": [old]})
    assert "Reconciling" not in json.dumps(status)
