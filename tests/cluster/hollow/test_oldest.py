"""One life cycle on the oldest supported Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flowprefill_operator.kinds import SERVICES
from support.control_plane.assets import assets
from support.control_plane.operated import Operated, operated, simulated
from support.control_plane.plane import ControlPlane
from support.control_plane.waiting import until

NAMESPACE = "oldest"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    """An operator at work on a control plane of its own."""
    folder = tmp_path_factory.mktemp("oldest")
    plane = ControlPlane(assets("oldest"), folder / "control-plane")
    plane.start()
    try:
        with operated(plane, folder) as found:
            yield found
    finally:
        plane.stop()


def test_a_service_lives_on_the_oldest_supported_kubernetes(cluster: Operated) -> None:
    cluster.plane.kubectl("create", "namespace", NAMESPACE)
    cluster.apply(NAMESPACE, simulated("web", prefill={"replicas": 2}))
    cluster.wait_ready(NAMESPACE, "web")
    cluster.change(NAMESPACE, "web", {"prefill": {"replicas": 3}, "scheduling": {"policy": "edf"}})
    until(lambda: len(cluster.pods(NAMESPACE, "web", "prefill")) == 3, "3 prefill pods")
    cluster.wait_ready(NAMESPACE, "web")
    cluster.change(NAMESPACE, "web", {"engine": {"blockSize": 32}})
    cluster.wait_ready(NAMESPACE, "web")
    current = cluster.service(NAMESPACE, "web")["status"]["revision"]["current"]
    until(lambda: cluster.revisions(NAMESPACE, "web") == {current}, "the pods before the change are gone")
    cluster.delete(SERVICES, NAMESPACE, "web")
    until(lambda: cluster.get(SERVICES, NAMESPACE, "web") is None, "the service is gone", within_s=5.0)
