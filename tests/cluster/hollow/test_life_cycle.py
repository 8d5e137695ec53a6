"""From apply to delete: every sample gets ready, changes as its spec does, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from flowprefill_crd.samples import sample_path
from flowprefill_operator.kinds import CLAIMS, SERVICES
from support.control_plane.hollow_behaviour import NeverReady
from support.control_plane.operated import Operated, simulated
from support.control_plane.waiting import until

Json = dict[str, Any]

SAMPLES = sorted(sample_path("quickstart.yaml").parent.glob("*.yaml"))


def uids(pods: list[Json]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def revision_of(pod: Json) -> str:
    return str(pod["metadata"]["labels"]["flowprefill.io/revision"])


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_gets_ready_and_when_deleted_leaves_nothing_but_its_models(
    cluster: Operated, namespace: str, sample: Path
) -> None:
    body = yaml.safe_load(sample.read_text())
    name = body["metadata"]["name"]
    cluster.apply(namespace, body)
    # The cluster has no KEDA: a sample that asks for it serves, and is not Ready as a whole.
    asks_for_keda = "provider: Keda" in sample.read_text()
    reached = "Available" if asks_for_keda else "Ready"
    cluster.wait_condition(namespace, name, reached, "True")
    if asks_for_keda:
        cluster.wait_condition(namespace, name, "Ready", "False", reason="CRDNotInstalled")
    service = cluster.service(namespace, name)
    status = service["status"]
    assert "finalizers" not in service["metadata"]
    assert status["url"] == f"http://{name}-proxy.{namespace}.svc:8000/v1"
    spec = body["spec"]
    wanted = {
        role: spec[role].get("replicas") or spec[role].get("autoscaling", {}).get("minReplicas", 1)
        for role in ("prefill", "decode", "proxy")
        if role in spec and not (role == "decode" and spec.get("mode") == "Colocated")
    }

    def ready() -> dict[str, int]:
        roles = cluster.service(namespace, name)["status"]["roles"]
        return {role: roles[role]["readyReplicas"] for role in wanted}

    until(lambda: ready() == wanted, f"pods {wanted}")
    waited = cluster.plane.kubectl(
        "wait", "-n", namespace, f"fps/{name}", f"--for=condition={reached}", "--timeout=5s"
    )
    assert "condition met" in waited.stdout

    uid = service["metadata"]["uid"]
    kept = {(CLAIMS.kind, item["metadata"]["name"]) for item in cluster.list(CLAIMS, namespace)}
    cluster.delete(SERVICES, namespace, name)
    until(lambda: cluster.get(SERVICES, namespace, name) is None, "the service is gone", within_s=5.0)
    until(lambda: set(cluster.owned(namespace, uid)) == kept, "what it owned is gone")
    until(lambda: not cluster.pods(namespace, name), "its pods are gone")


def test_kubectl_shows_a_service_at_a_glance(cluster: Operated, namespace: str) -> None:
    cluster.apply(namespace, simulated("web", prefill={"replicas": 2}))
    cluster.wait_ready(namespace, "web")
    header, row = cluster.plane.kubectl("get", "fps", "-n", namespace).stdout.splitlines()
    shown = dict(zip(header.split("  "), row.split(), strict=False))
    assert shown["NAME"] == "web"
    assert "2/2" in row
    assert "1/1" in row
    described = cluster.plane.kubectl("describe", "fps", "web", "-n", namespace).stdout
    assert "one token has been served" in described


def test_scale_by_spec_changes_the_pods_and_restarts_none(cluster: Operated, namespace: str) -> None:
    cluster.apply(namespace, simulated("web", prefill={"replicas": 1}, decode={"replicas": 2}))
    cluster.wait_ready(namespace, "web")
    first = uids(cluster.pods(namespace, "web"))
    cluster.change(namespace, "web", {"prefill": {"replicas": 4}})
    cluster.wait_ready(namespace, "web")
    assert len(cluster.pods(namespace, "web", "prefill")) == 4
    assert first <= uids(cluster.pods(namespace, "web"))
    cluster.change(namespace, "web", {"prefill": {"replicas": 2}, "decode": {"replicas": 1}})
    until(lambda: len(cluster.pods(namespace, "web", "prefill")) == 2, "2 prefill pods")
    until(lambda: len(cluster.pods(namespace, "web", "decode")) == 1, "1 decode pod")
    until(
        lambda: cluster.service(namespace, "web")["status"]["roles"]["prefill"]["summary"] == "2/2",
        "the status tells 2 of 2",
    )
    cluster.wait_ready(namespace, "web")


def test_a_live_change_reaches_the_pods_and_restarts_none(cluster: Operated, namespace: str) -> None:
    cluster.apply(namespace, simulated("web"))
    cluster.wait_ready(namespace, "web")
    before = uids(cluster.pods(namespace, "web"))
    cluster.node.admin.lagging.add((namespace, "web"))
    classes = [{"name": "chat", "ttftMilliseconds": 500, "objective": "99", "default": True}]
    cluster.change(namespace, "web", {"sloClasses": classes, "scheduling": {"policy": "edf"}})
    cluster.wait_condition(namespace, "web", "ConfigApplied", "False")
    cluster.node.admin.lagging.clear()
    cluster.wait_condition(namespace, "web", "ConfigApplied", "True", within_s=120.0)
    cluster.wait_ready(namespace, "web")
    assert uids(cluster.pods(namespace, "web")) == before


def test_a_restart_relevant_change_replaces_the_pair_only_when_the_new_one_is_ready(
    cluster: Operated, namespace: str
) -> None:
    cluster.apply(namespace, simulated("web"))
    cluster.wait_ready(namespace, "web")
    (old,) = {revision_of(pod) for pod in cluster.pods(namespace, "web", "prefill")}
    rule = cluster.node.behave(
        behaviour=NeverReady(),
        namespace=namespace,
        role="decode",
        predicate=lambda pod: revision_of(pod) != old,
    )
    cluster.change(namespace, "web", {"engine": {"type": "simulated", "blockSize": 32}})
    until(lambda: len(cluster.pods(namespace, "web", "prefill")) == 2, "both revisions' prefill pods")
    cluster.wait_condition(namespace, "web", "DecodeReady", "False")
    cluster.wait_condition(namespace, "web", "Available", "True")
    status = cluster.service(namespace, "web")["status"]
    assert status["revision"]["current"] == old
    assert status["revision"]["updating"] != old
    assert {revision_of(pod) for pod in cluster.pods(namespace, "web", "proxy")} == {old}
    cluster.node.forget(rule)
    cluster.wait_ready(namespace, "web")
    until(lambda: old not in cluster.revisions(namespace, "web"), "the old revision is gone")
    service = cluster.service(namespace, "web")
    assert service["status"]["revision"] == {"current": status["revision"]["updating"]}
    names = {
        name for kind, name in cluster.owned(namespace, service["metadata"]["uid"]) if kind == "Deployment"
    }
    assert not any(old in name for name in names)


def test_a_change_taken_back_in_the_middle_leaves_the_pods_as_they_were(
    cluster: Operated, namespace: str
) -> None:
    cluster.apply(namespace, simulated("web"))
    cluster.wait_ready(namespace, "web")
    before = uids(cluster.pods(namespace, "web"))
    (old,) = {revision_of(pod) for pod in cluster.pods(namespace, "web", "prefill")}
    cluster.node.behave(
        behaviour=NeverReady(), namespace=namespace, predicate=lambda pod: revision_of(pod) != old
    )
    cluster.change(namespace, "web", {"engine": {"blockSize": 32}})
    until(lambda: len(cluster.pods(namespace, "web", "decode")) == 2, "both revisions' decode pods")
    cluster.change(namespace, "web", {"engine": {"blockSize": 16}})
    cluster.wait_ready(namespace, "web")
    until(lambda: uids(cluster.pods(namespace, "web")) == before, "the first pods alone are left")


def test_a_paused_service_is_left_as_it_is(cluster: Operated, namespace: str) -> None:
    cluster.apply(namespace, simulated("web"))
    cluster.wait_ready(namespace, "web")
    cluster.change(namespace, "web", {"paused": True, "prefill": {"replicas": 3}})
    cluster.wait_condition(namespace, "web", "ObjectsApplied", "Unknown", reason="Paused")
    assert len(cluster.pods(namespace, "web", "prefill")) == 1
    cluster.change(namespace, "web", {"paused": False})
    cluster.wait_ready(namespace, "web")
    assert len(cluster.pods(namespace, "web", "prefill")) == 3
