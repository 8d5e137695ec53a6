"""A real Prometheus scrapes a service's pods, because the operator says where they are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.control_plane.ecosystem_prometheus import Prometheus
from support.control_plane.ecosystem_services import MODEL, applied, small
from support.control_plane.node_release import NodeRelease
from support.control_plane.node_service import NodeService
from support.control_plane.waiting import until

SCRAPED_S = 60.0


@pytest.fixture(scope="module")
def service(operator_release: NodeRelease, prometheus: Prometheus) -> Iterator[NodeService]:
    """A service with two prefill pods."""
    with applied(operator_release.node, small("seen", prefill={"replicas": 2})) as service:
        service.wait_ready()
        prometheus.follow(service.namespace)
        yield service


def _up(prometheus: Prometheus, service: NodeService) -> list[tuple[str, str, str]]:
    """(service, role, pod) of each target that answers."""
    return sorted(
        (labels.get("service", ""), labels.get("role", ""), labels["pod"])
        for labels in (
            target["labels"] for target in prometheus.targets(service.namespace) if target["health"] == "up"
        )
    )


def test_every_pod_is_scraped_under_its_service_and_role(
    service: NodeService, prometheus: Prometheus
) -> None:
    wanted = sorted(
        ("seen", role, pod["metadata"]["name"])
        for role in ("prefill", "decode", "proxy")
        for pod in service.pods(role)
    )
    assert [role for _, role, _ in wanted] == ["decode", "prefill", "prefill", "proxy"]
    until(lambda: _up(prometheus, service) == wanted, f"{wanted} up", within_s=SCRAPED_S)


def test_prometheus_counts_the_requests_that_were_sent(service: NodeService, prometheus: Prometheus) -> None:
    of_service = f'{{namespace="{service.namespace}",service="seen",role="proxy",slo_class="chat"}}'
    query = f"sum(flowprefill_ttft_slo_requests_total{of_service})"
    until(lambda: prometheus.query(query), f"an answer to {query}", within_s=SCRAPED_S)
    assert prometheus.query(query) == [({}, 0.0)]
    for number in range(3):
        done = service.ask(MODEL, f"Question {number}", "2")
        assert done.returncode == 0, done.stderr
    until(lambda: prometheus.query(query) == [({}, 3.0)], "3 requests", within_s=SCRAPED_S)


def test_without_pod_monitor_nothing_is_scraped(service: NodeService, prometheus: Prometheus) -> None:
    before = service.lives()
    assert prometheus.targets(service.namespace)
    service.change({"observability": {"podMonitor": False}})
    prometheus.follow(service.namespace, monitored=False)
    assert not prometheus.targets(service.namespace)
    assert not service.kubectl("get", "podmonitors", "-o", "name")
    assert service.lives() == before
    service.change({"observability": {"podMonitor": True}})
    prometheus.follow(service.namespace)
    until(lambda: len(_up(prometheus, service)) == 4, "4 targets again", within_s=SCRAPED_S)
