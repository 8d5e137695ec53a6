"""A HorizontalPodAutoscaler scales a role by the CPU that its pods really use. The tests follow each other on one service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.control_plane.ecosystem_metrics_server import metrics_server
from support.control_plane.ecosystem_services import FewestSeen, applied, prefill_deployments, small
from support.control_plane.node_release import NodeRelease
from support.control_plane.node_service import NodeService
from support.control_plane.waiting import until

SCALED_S = 240.0
RATE = 6.0
SCALING = {"minReplicas": 1, "maxReplicas": 3, "targetUtilizationPercent": 15}
"""An idle pod uses 5 to 10 % of the CPU that it asks for, the only one under this load at least 30 %."""


@pytest.fixture(scope="module")
def service(operator_release: NodeRelease, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeService]:
    """A service whose prefill pods are scaled from 1 to 3."""
    node = operator_release.node
    with (
        metrics_server(node, tmp_path_factory.mktemp("metrics-server")),
        applied(node, small("busy", prefill={"autoscaling": SCALING})) as service,
    ):
        service.wait_ready()
        yield service


def _autoscaler(service: NodeService) -> dict[str, Any]:
    return service.node.plane.get("--namespace", service.namespace, "hpa", "busy-prefill")


def _has_taken_over(service: NodeService) -> bool:
    """Whether the autoscaler has measured the live revision's pods and said how many there are to be."""
    found = _autoscaler(service)
    (live,) = prefill_deployments(service)
    conditions = {c["type"]: c["status"] for c in found["status"].get("conditions", ())}
    return (
        found["spec"]["scaleTargetRef"]["name"] == live
        and conditions.get("ScalingActive") == "True"
        and bool(found["status"].get("currentMetrics"))
    )


def test_busy_pods_get_more_beside_them(service: NodeService, tmp_path: Path) -> None:
    assert list(prefill_deployments(service).values()) == [1]
    with service.load(tmp_path / "outcomes", rate=RATE):
        until(lambda: list(prefill_deployments(service).values()) == [3], "3 prefill pods", within_s=SCALED_S)
        until(
            lambda: service.get()["status"]["roles"]["prefill"]["summary"] == "3/3",
            "the status tells 3 of 3",
            within_s=SCALED_S,
        )


def test_the_autoscaler_follows_a_rollout_and_no_pod_is_missing_on_the_way(service: NodeService) -> None:
    (before,) = prefill_deployments(service)
    with FewestSeen(service) as fewest:
        service.change({"engine": {"blockSize": 32}})
        service.wait_ready()
        until(lambda: len(prefill_deployments(service)) == 1, "one revision", within_s=SCALED_S)
        until(lambda: _has_taken_over(service), "the autoscaler measures the new pods", within_s=SCALED_S)
    assert list(prefill_deployments(service)) != [before]
    assert (fewest.asked, fewest.ready) == (3, 3)


def test_three_pods_stay_three_while_an_autoscaler_takes_over(service: NodeService) -> None:
    service.change({"prefill": {"replicas": 3, "autoscaling": None}})
    service.wait_ready()
    until(lambda: not service.kubectl("get", "hpa", "-o", "name"), "no autoscaler")
    before = service.lives("prefill")
    with FewestSeen(service) as fewest:
        service.change({"prefill": {"replicas": None, "autoscaling": SCALING}})
        service.wait_ready()
        until(lambda: _has_taken_over(service), "the autoscaler measures the pods", within_s=SCALED_S)
    assert (fewest.asked, fewest.ready) == (3, 3)
    assert service.lives("prefill") == before
