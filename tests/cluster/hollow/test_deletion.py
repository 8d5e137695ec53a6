"""Deleting never hangs, with the operator up or down; no service ever has a finalizer."""

from __future__ import annotations

from typing import Any

from flowprefill_operator.kinds import PODS, SERVICES, Kind
from support.control_plane.operated import Operated, simulated
from support.control_plane.waiting import until

Json = dict[str, Any]

GONE_S = 60.0
"""The garbage collector and the namespace controller take this long on a busy machine; nobody else is waited for."""


def namespace_gone(cluster: Operated, namespace: str) -> bool:
    return cluster.http.get(f"/api/v1/namespaces/{namespace}").status_code == 404


def test_a_service_that_is_deleted_while_no_operator_runs_takes_everything_with_it(
    cluster: Operated, namespace: str
) -> None:
    created = cluster.apply(namespace, simulated("web", prefill={"replicas": 2}))
    cluster.wait_ready(namespace, "web")
    assert "finalizers" not in cluster.service(namespace, "web")["metadata"]
    with cluster.operator_down():
        cluster.delete(SERVICES, namespace, "web")
        until(lambda: cluster.get(SERVICES, namespace, "web") is None, "the service is gone", within_s=5.0)
        uid = created["metadata"]["uid"]
        until(lambda: not cluster.owned(namespace, uid), "what it owned is gone", within_s=GONE_S)
        until(lambda: not cluster.list(PODS, namespace), "its pods are gone", within_s=GONE_S)
    assert cluster.owned(namespace, uid) == {}


def test_a_service_that_is_made_again_under_its_name_is_another(cluster: Operated, namespace: str) -> None:
    first = cluster.apply(namespace, simulated("web"))
    cluster.wait_ready(namespace, "web")
    cluster.delete(SERVICES, namespace, "web")
    second = cluster.apply(namespace, simulated("web"))
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    cluster.wait_ready(namespace, "web")
    until(lambda: not cluster.owned(namespace, first["metadata"]["uid"]), "the first one's objects are gone")
    owned = cluster.owned(namespace, second["metadata"]["uid"])
    owners = {
        reference["uid"]
        for item in owned.values()
        for reference in item["metadata"].get("ownerReferences", ())
    }
    assert owners == {second["metadata"]["uid"]}


def test_an_object_of_a_service_that_went_while_no_operator_ran_stays_gone(
    cluster: Operated, namespace: str
) -> None:
    cluster.apply(namespace, simulated("web"))
    cluster.apply(namespace, simulated("other"))
    cluster.wait_ready(namespace, "web")
    cluster.wait_ready(namespace, "other")
    with cluster.operator_down():
        cluster.delete(SERVICES, namespace, "web")
        until(lambda: not cluster.pods(namespace, "web"), "its pods are gone", within_s=GONE_S)
    cluster.wait_ready(namespace, "other")
    assert cluster.pods(namespace, "web") == []


def test_a_change_that_was_made_while_no_operator_ran_is_made_good(cluster: Operated, namespace: str) -> None:
    cluster.apply(namespace, simulated("web"))
    cluster.wait_ready(namespace, "web")
    services = Kind(kind="Service", plural="services")
    with cluster.operator_down():
        cluster.change(namespace, "web", {"prefill": {"replicas": 3}})
        cluster.delete(services, namespace, "web-proxy")
    cluster.wait_ready(namespace, "web")
    until(lambda: len(cluster.pods(namespace, "web", "prefill")) == 3, "3 prefill pods")
    until(lambda: cluster.get(services, namespace, "web-proxy"), "the Service is there again")


def test_a_new_operator_changes_nothing_of_what_runs(cluster: Operated, namespace: str) -> None:
    cluster.apply(namespace, simulated("web", prefill={"replicas": 2}))
    cluster.wait_ready(namespace, "web")
    pods = {pod["metadata"]["uid"] for pod in cluster.pods(namespace, "web")}
    before = cluster.service(namespace, "web")
    writes = len(cluster.faulty.calls.writes())
    cluster.operator.restart()
    looks = len(cluster.faulty.calls.all())
    cluster.apply(namespace, simulated("probe"))  # the new operator is at work when this one is ready
    cluster.wait_ready(namespace, "probe")
    written = {c.name for c in cluster.faulty.calls.writes()[writes:] if c.namespace == namespace}
    assert looks > 0
    assert not {name for name in written if name and (name == "web" or name.startswith("web-"))}
    assert {pod["metadata"]["uid"] for pod in cluster.pods(namespace, "web")} == pods
    assert cluster.service(namespace, "web")["status"] == before["status"]


def test_a_namespace_is_deleted_with_its_services(cluster: Operated, namespace: str) -> None:
    for name in ("one", "two", "three"):
        cluster.apply(namespace, simulated(name))
    for name in ("one", "two", "three"):
        cluster.wait_ready(namespace, name)
    cluster.plane.kubectl("delete", "namespace", namespace, "--wait=false")
    until(lambda: namespace_gone(cluster, namespace), "the namespace is gone", within_s=GONE_S)
    cluster.plane.kubectl("create", "namespace", namespace)


def test_a_namespace_is_deleted_while_no_operator_runs(cluster: Operated, namespace: str) -> None:
    cluster.apply(namespace, simulated("web"))
    cluster.wait_ready(namespace, "web")
    with cluster.operator_down():
        cluster.plane.kubectl("delete", "namespace", namespace, "--wait=false")
        until(lambda: namespace_gone(cluster, namespace), "the namespace is gone", within_s=GONE_S)
    cluster.plane.kubectl("create", "namespace", namespace)
