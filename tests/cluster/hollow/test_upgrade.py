"""A newer operator takes over without touching a pod; what it would run instead is told, and taken when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.control_plane.operated import Operated, simulated
from support.control_plane.waiting import until
from support.releases import last_release

Json = dict[str, Any]

NEWER = {"images": {"simulated": "registry.example/serving:2", "proxy": "registry.example/serving:2"}}
LOOKED_S = 90.0


@pytest.fixture
def upgraded(cluster: Operated) -> Iterator[Operated]:
    """Gives the operator that the case started back its own images afterwards."""
    yield cluster
    cluster.operator.stop()
    cluster.operator.python_path = None
    cluster.operator.configure(images={})
    cluster.operator.start()
    cluster.operator.wait_ready()


def images(pods: list[Json]) -> set[str]:
    return {container["image"] for pod in pods for container in pod["spec"]["containers"]}


def uids(pods: list[Json]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def upgrade(cluster: Operated) -> None:
    cluster.operator.stop()
    cluster.operator.configure(**NEWER)
    cluster.operator.start()
    cluster.operator.wait_ready()


def test_an_upgrade_restarts_no_pod_and_tells_what_is_newer(upgraded: Operated, namespace: str) -> None:
    upgraded.apply(namespace, simulated("web", prefill={"replicas": 2}))
    upgraded.wait_ready(namespace, "web")
    before = uids(upgraded.pods(namespace, "web"))
    upgrade(upgraded)
    until(
        lambda: upgraded.service(namespace, "web")["status"].get("upgradeAvailable"),
        "the upgrade is told",
        within_s=LOOKED_S,
    )
    upgraded.wait_ready(namespace, "web")
    assert uids(upgraded.pods(namespace, "web")) == before
    # A live change and a change of the number of pods keep the old image too.
    upgraded.change(namespace, "web", {"scheduling": {"policy": "edf"}, "prefill": {"replicas": 3}})
    upgraded.wait_ready(namespace, "web")
    until(lambda: len(upgraded.pods(namespace, "web", "prefill")) == 3, "3 prefill pods")
    assert before <= uids(upgraded.pods(namespace, "web"))
    assert "registry.example/serving:2" not in images(upgraded.pods(namespace, "web"))


def test_a_restart_relevant_change_takes_the_newer_image(upgraded: Operated, namespace: str) -> None:
    upgraded.apply(namespace, simulated("web"))
    upgraded.wait_ready(namespace, "web")
    upgrade(upgraded)
    upgraded.change(namespace, "web", {"engine": {"blockSize": 32}})
    upgraded.wait_ready(namespace, "web", within_s=LOOKED_S)
    until(
        lambda: images(upgraded.pods(namespace, "web")) == {"registry.example/serving:2"},
        "the newer image alone",
    )
    assert "upgradeAvailable" not in upgraded.service(namespace, "web")["status"]


def test_an_automatic_policy_takes_the_newer_image_without_anybody(
    upgraded: Operated, namespace: str
) -> None:
    upgraded.apply(namespace, simulated("web", upgradePolicy="Automatic"))
    upgraded.wait_ready(namespace, "web")
    upgrade(upgraded)
    until(
        lambda: images(upgraded.pods(namespace, "web")) == {"registry.example/serving:2"},
        "the newer image alone",
        within_s=LOOKED_S,
    )
    upgraded.wait_ready(namespace, "web")


def test_a_rollback_of_the_operator_restarts_no_pod_either(upgraded: Operated, namespace: str) -> None:
    upgrade(upgraded)
    upgraded.apply(namespace, simulated("web"))
    upgraded.wait_ready(namespace, "web")
    before = uids(upgraded.pods(namespace, "web"))
    upgraded.operator.stop()
    upgraded.operator.configure(images={})
    upgraded.operator.start()
    upgraded.operator.wait_ready()
    upgraded.change(namespace, "web", {"decode": {"replicas": 2}})
    upgraded.wait_ready(namespace, "web")
    assert before <= uids(upgraded.pods(namespace, "web"))


OF_ALL_KINDS: dict[str, Json] = {
    "web": {"prefill": {"replicas": 2}, "proxy": {"replicas": 2}},
    "scaled": {"prefill": {"autoscaling": {"minReplicas": 2, "maxReplicas": 3}}},
    "hub": {"model": {"uri": "hf://organisation/model", "cache": {"emptyDir": {"sizeLimit": "1Gi"}}}},
    "both": {"mode": "Colocated"},
    "next": {"prefill": {"podTemplate": {"metadata": {"annotations": {"team": "search"}}}}},
}


def test_the_last_releases_operator_hands_over_and_takes_back_without_touching_a_pod(
    upgraded: Operated, namespace: str, tmp_path: Path
) -> None:
    released = last_release(tmp_path / "release").python_path

    def run(python_path: str | None) -> None:
        upgraded.operator.stop()
        upgraded.operator.python_path = python_path
        upgraded.operator.start()
        upgraded.operator.wait_ready()

    run(released)
    for name, spec in OF_ALL_KINDS.items():
        upgraded.apply(namespace, simulated(name, **spec))
    for name in OF_ALL_KINDS:
        upgraded.wait_ready(namespace, name)
    before = {uid for name in OF_ALL_KINDS for uid in uids(upgraded.pods(namespace, name))}
    assert len(before) == 17
    for weight, operator in enumerate((None, released), start=2):
        run(operator)
        classes = [{**slo, "weight": weight} for slo in simulated("any")["spec"]["sloClasses"]]
        for name in OF_ALL_KINDS:  # a pass that has something to do, and ends when pods have it
            upgraded.change(namespace, name, {"sloClasses": classes})
        for name in OF_ALL_KINDS:
            upgraded.wait_ready(namespace, name)
        after = {uid for name in OF_ALL_KINDS for uid in uids(upgraded.pods(namespace, name))}
        assert after == before
