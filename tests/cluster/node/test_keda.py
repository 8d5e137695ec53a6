"""KEDA scales a role by what Prometheus knows of its load. The tests follow each other on one service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.control_plane import ecosystem_prometheus
from support.control_plane.ecosystem_keda import Keda
from support.control_plane.ecosystem_prometheus import Prometheus
from support.control_plane.ecosystem_services import applied, prefill_deployments, small
from support.control_plane.node_release import NodeRelease
from support.control_plane.node_service import NodeService
from support.control_plane.waiting import until

NOTICED_S = 75.0
"""The operator looks every 60 s for APIs that came or went."""
SCALED_S = 180.0
"""A load counts as the mean of a minute, and KEDA's autoscaler looks every 15 s."""
RATE = 2.0
SCALING = {
    "provider": "Keda",
    "prometheusAddress": ecosystem_prometheus.ADDRESS,
    "minReplicas": 1,
    "maxReplicas": 3,
    "targetUtilizationPercent": 10,
    "scaleDownStabilizationSeconds": 0,
}


@pytest.fixture(scope="module")
def keda(
    operator_release: NodeRelease, prometheus: Prometheus, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Keda]:
    """To be installed by the first test."""
    found = Keda(operator_release.node, tmp_path_factory.mktemp("keda"))
    yield found
    found.uninstall()


@pytest.fixture(scope="module")
def service(operator_release: NodeRelease, keda: Keda) -> Iterator[NodeService]:
    """A service that asks for KEDA before the cluster has it."""
    with applied(operator_release.node, small("scaled", prefill={"autoscaling": SCALING})) as service:
        yield service


def _autoscaling(service: NodeService) -> str | None:
    """The reason of condition AutoscalingReady, which is there only when false."""
    found = [c for c in service.get()["status"]["conditions"] if c["type"] == "AutoscalingReady"]
    return found[0]["reason"] if found else None


def test_a_scaled_object_is_made_soon_after_keda_came(service: NodeService, keda: Keda) -> None:
    service.wait_for("Available")
    assert _autoscaling(service) == "CRDNotInstalled"
    keda.install()
    until(
        lambda: (
            "scaledobject.keda.sh/scaled-prefill" in service.kubectl("get", "scaledobjects", "-o", "name")
        ),
        "a ScaledObject",
        within_s=NOTICED_S,
    )
    service.wait_ready()
    assert _autoscaling(service) is None
    keda.wait_ready()


def test_prefill_pods_follow_their_load(service: NodeService, prometheus: Prometheus, tmp_path: Path) -> None:
    prometheus.follow(service.namespace)
    (name,) = prefill_deployments(service)
    assert prefill_deployments(service) == {name: 1}
    with service.load(tmp_path / "outcomes", rate=RATE):
        # One long prefill is always under way, so that some pod is at work for a third of the time or more.
        until(lambda: prefill_deployments(service) == {name: 3}, "3 prefill pods", within_s=SCALED_S)
        until(
            lambda: service.get()["status"]["roles"]["prefill"]["summary"] == "3/3",
            "the status tells 3 of 3",
            within_s=SCALED_S,
        )
    until(lambda: prefill_deployments(service) == {name: 1}, "1 prefill pod again", within_s=SCALED_S)


def test_keda_follows_a_rollout(service: NodeService) -> None:
    (before,) = prefill_deployments(service)
    service.change({"engine": {"blockSize": 32}})
    service.wait_ready()
    until(lambda: len(prefill_deployments(service)) == 1, "one revision", within_s=SCALED_S)
    (live,) = prefill_deployments(service)
    assert live != before
    # KEDA has its own autoscaler for each ScaledObject.
    target = ("get", "hpa", "keda-hpa-scaled-prefill", "-o", "jsonpath={.spec.scaleTargetRef.name}")
    until(lambda: service.kubectl(*target) == live, f"KEDA scales {live}", within_s=SCALED_S)
