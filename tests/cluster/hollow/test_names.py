"""Services keep to their own objects: in one namespace, under one name in two, and beside what was there before."""

from __future__ import annotations

from typing import Any

import pytest

from flowprefill_operator.kinds import CONFIG_MAPS, DEPLOYMENTS, SERVICES, Kind
from support.control_plane.operated import Operated, simulated
from support.control_plane.waiting import until

Json = dict[str, Any]

CORE_SERVICES = Kind(kind="Service", plural="services")


def foreign(name: str) -> Json:
    return {"metadata": {"name": name, "labels": {"made-by": "somebody"}}, "data": {"mine": "yes"}}


def test_an_object_of_somebody_else_is_never_taken_and_is_named(cluster: Operated, namespace: str) -> None:
    cluster.create(CONFIG_MAPS, namespace, foreign("web-live"))
    cluster.apply(namespace, simulated("web"))
    told = cluster.wait_condition(namespace, "web", "Ready", "False", reason="NameConflict")
    assert "web-live" in told["message"]
    assert "Stalled" in cluster.conditions(namespace, "web")
    found = cluster.get(CONFIG_MAPS, namespace, "web-live")
    assert found is not None
    assert found["data"] == {"mine": "yes"}
    assert "ownerReferences" not in found["metadata"]
    cluster.delete(CONFIG_MAPS, namespace, "web-live")
    cluster.wait_ready(namespace, "web")


def test_an_object_that_carries_the_labels_of_a_service_without_being_its_own_is_not_taken_either(
    cluster: Operated, namespace: str
) -> None:
    cluster.apply(namespace, simulated("other"))
    cluster.wait_ready(namespace, "other")
    uid = cluster.service(namespace, "other")["metadata"]["uid"]
    body = foreign("copied")
    body["metadata"]["labels"] |= {"flowprefill.io/service": "other", "flowprefill.io/owner-uid": uid}
    cluster.create(CONFIG_MAPS, namespace, body)
    cluster.change(namespace, "other", {"prefill": {"replicas": 2}})
    cluster.wait_ready(namespace, "other")
    assert cluster.get(CONFIG_MAPS, namespace, "copied") is not None, "a copy of the labels makes no child"


def test_a_selector_of_a_foreign_service_is_left_alone(cluster: Operated, namespace: str) -> None:
    body = {"metadata": {"name": "web-proxy"}, "spec": {"selector": {"app": "mine"}, "ports": [{"port": 80}]}}
    cluster.create(CORE_SERVICES, namespace, body)
    cluster.apply(namespace, simulated("web"))
    cluster.wait_condition(namespace, "web", "Ready", "False", reason="NameConflict", says="web-proxy")
    found = cluster.get(CORE_SERVICES, namespace, "web-proxy")
    assert found is not None
    assert found["spec"]["selector"] == {"app": "mine"}


@pytest.mark.parametrize(("first", "second"), [("web", "web-proxy"), ("a.b", "a-b"), ("1st", "s1st")])
def test_two_services_in_one_namespace_never_touch_each_other(
    cluster: Operated, namespace: str, first: str, second: str
) -> None:
    made = {name: cluster.apply(namespace, simulated(name)) for name in (first, second)}
    for name in (first, second):
        cluster.wait_ready(namespace, name)
    objects = {name: cluster.owned(namespace, body["metadata"]["uid"]) for name, body in made.items()}
    assert not set(objects[first]) & set(objects[second])
    kept = {pod["metadata"]["uid"] for pod in cluster.pods(namespace, second)}
    cluster.change(namespace, first, {"engine": {"blockSize": 32}})
    cluster.wait_ready(namespace, first)
    cluster.delete(SERVICES, namespace, first)
    until(lambda: not cluster.pods(namespace, first), "the first one's pods are gone")
    assert {pod["metadata"]["uid"] for pod in cluster.pods(namespace, second)} == kept
    assert set(cluster.owned(namespace, made[second]["metadata"]["uid"])) == set(objects[second])
    cluster.wait_ready(namespace, second)


def test_one_name_in_two_namespaces_is_two_services(cluster: Operated, namespace: str) -> None:
    other = f"{namespace}-too"
    cluster.plane.kubectl("create", "namespace", other)
    try:
        cluster.apply(namespace, simulated("web", prefill={"replicas": 1}))
        cluster.apply(other, simulated("web", prefill={"replicas": 3}))
        for place in (namespace, other):
            cluster.wait_ready(place, "web")
        assert len(cluster.pods(namespace, "web", "prefill")) == 1
        assert len(cluster.pods(other, "web", "prefill")) == 3
        kept = {pod["metadata"]["uid"] for pod in cluster.pods(other, "web")}
        cluster.delete(SERVICES, namespace, "web")
        until(lambda: not cluster.list(DEPLOYMENTS, namespace), "the Deployments of the first are gone")
        assert {pod["metadata"]["uid"] for pod in cluster.pods(other, "web")} == kept
        cluster.wait_ready(other, "web")
    finally:
        cluster.plane.kubectl("delete", "namespace", other, "--wait=false")


def test_a_name_as_long_as_a_name_may_be_is_served(cluster: Operated, namespace: str) -> None:
    name = ".".join(["x" * 62] * 4)
    assert len(name) == 251
    cluster.apply(namespace, simulated(name))
    cluster.wait_ready(namespace, name)
    uid = cluster.service(namespace, name)["metadata"]["uid"]
    assert max(len(child) for kind, child in cluster.owned(namespace, uid) if kind == "Service") <= 50
