"""What changes around the operator while it runs: other projects' CRDs, its own CRD, its rights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flowprefill_operator.kinds import OWNED
from support.control_plane.operated import Operated, operated, simulated
from support.control_plane.operator_identity import chart_rules, grant, without
from support.control_plane.plane import ControlPlane
from support.control_plane.waiting import until
from support.ecosystem import ecosystem_crds

Json = dict[str, Any]


@pytest.fixture(scope="module")
def cluster(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    """An operator that looks at everything every 2 seconds: what is found by polling is found soon."""
    with operated(plane, tmp_path_factory.mktemp("operator"), resyncSeconds=2) as found:
        yield found


def test_the_schema_of_another_release_is_told(cluster: Operated, namespace: str) -> None:
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/flowprefillservices.flowprefill.io"
    crd = cluster.http.get(path).json()
    notes = crd["metadata"]["annotations"]
    (hash_name,) = [name for name in notes if name.startswith("flowprefill.io/")]
    cluster.apply(namespace, simulated("web"))
    cluster.wait_ready(namespace, "web")
    header = {"content-type": "application/merge-patch+json"}

    def annotate(value: str) -> None:
        body = {"metadata": {"annotations": {hash_name: value}}}
        assert cluster.http.patch(path, json=body, headers=header).is_success

    annotate("of-another-release")
    try:
        cluster.wait_condition(namespace, "web", "SchemaCurrent", "False", reason="CRDOutdated")
        cluster.wait_condition(namespace, "web", "Available", "True")
    finally:
        annotate(notes[hash_name])
    until(lambda: "SchemaCurrent" not in cluster.conditions(namespace, "web"), "it is over")


PIECES = (
    ("configmaps", "ConfigMap", "-live"),
    ("controllerrevisions", "ControllerRevision", ""),
    ("deployments", "Deployment", "-decode-"),
    ("services", "Service", "-proxy"),
    ("serviceaccounts", "ServiceAccount", "-proxy"),
    ("roles", "Role", "-proxy"),
    ("rolebindings", "RoleBinding", "-proxy"),
    ("networkpolicies", "NetworkPolicy", "-workers"),
    ("poddisruptionbudgets", "PodDisruptionBudget", "-prefill"),
    ("horizontalpodautoscalers", "HorizontalPodAutoscaler", "-decode"),
)
"""Resource, kind and a part of the name of an object that a service needs."""


@pytest.fixture(scope="module")
def whole(cluster: Operated) -> Iterator[str]:
    """The namespace of a service `web` with an object of each of those kinds."""
    name = "rights"
    cluster.plane.kubectl("create", "namespace", name)
    scaling = {"minReplicas": 2, "maxReplicas": 4}
    cpu = {"requests": {"cpu": "1"}}
    cluster.apply(
        name, simulated("web", prefill={"replicas": 2}, decode={"autoscaling": scaling, "resources": cpu})
    )
    cluster.wait_ready(name, "web")
    yield name
    grant(cluster.plane)
    cluster.plane.kubectl("delete", "namespace", name, "--wait=false")


@pytest.mark.parametrize("verb", ["create", "patch"])
@pytest.mark.parametrize(
    ("resource", "kind", "part"), PIECES, ids=lambda value: value if value.islower() else ""
)
def test_a_verb_that_is_taken_away_is_named_and_what_is_missing_is_made_when_it_is_back(
    cluster: Operated, whole: str, verb: str, resource: str, kind: str, part: str
) -> None:
    group = next(found for found in OWNED if found.kind == kind)
    uid = cluster.service(whole, "web")["metadata"]["uid"]
    name = next(n for k, n in cluster.owned(whole, uid) if k == kind and part in n)
    grant(cluster.plane, without(chart_rules(), verb, resource))
    cluster.delete(group, whole, name)
    told = cluster.wait_condition(whole, "web", "ObjectsApplied", "False", reason="Forbidden")
    assert verb in told["message"]
    assert group.resource in told["message"]
    ready = cluster.wait_condition(whole, "web", "Ready", "False", reason="Forbidden")
    assert group.resource in ready["message"]
    assert "Stalled" in cluster.conditions(whole, "web")
    grant(cluster.plane)
    cluster.wait_ready(whole, "web")
    assert cluster.get(group, whole, name) is not None


@pytest.mark.parametrize(
    "resource", ["configmaps", "deployments.apps", "pods", "networkpolicies.networking.k8s.io"]
)
def test_a_watch_that_is_refused_is_named_and_heals(cluster: Operated, namespace: str, resource: str) -> None:
    cluster.apply(namespace, simulated("web"))
    cluster.wait_ready(namespace, "web")
    refusal = cluster.faulty.refuse(403, verb="watch", resource=resource)
    cluster.wait_condition(namespace, "web", "Ready", "False", reason="Forbidden", says=resource)
    assert "watch" in cluster.conditions(namespace, "web")["Ready"]["message"]
    cluster.wait_condition(namespace, "web", "Available", "True")
    cluster.faulty.heal(refusal)
    cluster.wait_ready(namespace, "web", within_s=90.0)
    assert cluster.operator.running


def test_crds_of_other_projects_are_used_when_they_appear_and_missed_when_they_go(
    cluster: Operated, namespace: str
) -> None:
    files = ecosystem_crds()
    for file in files:  # another module may have left them
        cluster.plane.kubectl("delete", "--ignore-not-found", "-f", str(file))
    scaling = {
        "minReplicas": 2,
        "maxReplicas": 4,
        "provider": "Keda",
        "prometheusAddress": "http://prometheus.monitoring:9090",
    }
    created = cluster.apply(namespace, simulated("web", prefill={"autoscaling": scaling}))
    cluster.wait_condition(namespace, "web", "Available", "True")
    cluster.wait_condition(namespace, "web", "AutoscalingReady", "False", reason="CRDNotInstalled")
    cluster.wait_condition(namespace, "web", "Ready", "False", reason="CRDNotInstalled")
    before = {pod["metadata"]["uid"] for pod in cluster.pods(namespace, "web")}
    scaled = next(kind for kind in OWNED if kind.kind == "ScaledObject")

    def kinds() -> set[str]:
        return {kind for kind, _ in cluster.owned(namespace, created["metadata"]["uid"])}

    def missing() -> bool:
        return "AutoscalingReady" in cluster.conditions(namespace, "web")

    try:
        for file in files:
            cluster.plane.kubectl("apply", "--server-side", "-f", str(file))
        until(lambda: {"PodMonitor", "ScaledObject"} <= kinds(), "a PodMonitor and a ScaledObject")
        until(lambda: not missing(), "nothing is missing")
        cluster.wait_ready(namespace, "web")
        (found,) = cluster.list(scaled, namespace)
        cluster.delete(scaled, namespace, found["metadata"]["name"])
        until(lambda: cluster.list(scaled, namespace), "a deleted ScaledObject is there again", within_s=10.0)
    finally:
        for file in files:
            cluster.plane.kubectl("delete", "-f", str(file))
    until(missing, "the ScaledObject is missed")
    cluster.change(namespace, "web", {"decode": {"replicas": 2}})
    until(lambda: len(cluster.pods(namespace, "web", role="decode")) == 2, "a second decode pod")
    cluster.wait_condition(namespace, "web", "DecodeReady", "True")
    cluster.wait_condition(namespace, "web", "Ready", "False", reason="CRDNotInstalled")
    assert before <= {pod["metadata"]["uid"] for pod in cluster.pods(namespace, "web")}
