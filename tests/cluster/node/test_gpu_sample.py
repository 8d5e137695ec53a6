"""A sample that asks for GPUs, on a node that claims to have some."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from flowprefill_crd.samples import sample_path
from support.control_plane.node import Node
from support.control_plane.node_pods import restricted_namespace
from support.control_plane.node_release import NodeRelease
from support.control_plane.node_service import NodeService
from support.control_plane.waiting import until

GPU = "nvidia.com/gpu"


@pytest.fixture
def service(operator_release: NodeRelease) -> Iterator[NodeService]:
    """The sample, just applied."""
    with restricted_namespace(operator_release.node) as namespace:
        service = NodeService(operator_release.node, namespace, "gpu-simulated")
        service.kubectl("apply", "-f", str(sample_path("gpu-simulated.yaml")))
        yield service
        service.delete()


@pytest.fixture
def gpus(node: Node) -> Iterator[None]:
    """Eight GPUs on the node."""
    node.set_capacity(GPU, 8)
    yield
    node.set_capacity(GPU, 0)


def test_without_gpus_the_service_says_so(service: NodeService) -> None:
    def refused() -> str | None:
        conditions = service.get().get("status", {}).get("conditions", ())
        found = [c for c in conditions if c["type"] == "PrefillReady" and c["reason"] == "Unschedulable"]
        return found[0]["message"] if found else None

    assert f"Insufficient {GPU}" in until(refused, "pods without a node")


@pytest.mark.usefixtures("gpus")
def test_a_gpu_sample_is_scheduled_and_serves(service: NodeService) -> None:
    service.wait_ready()
    asked = [pod["spec"]["containers"][0]["resources"]["limits"][GPU] for pod in service.pods("prefill")]
    assert asked == ["1", "1"]
    done = service.ask("smollm2-135m-instruct", "Hello", "5")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completion_tokens"] == 5
