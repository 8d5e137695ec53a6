"""The sample with vLLM, on a node without GPUs: its image, its read-only root, its volumes, its probes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from flowprefill_crd.samples import sample_path
from support.control_plane.node_pods import restricted_namespace
from support.control_plane.node_release import NodeRelease
from support.control_plane.node_service import NodeService

STARTED_S = 900.0
"""vLLM on two busy cores, which a second program may have a part of."""


@pytest.fixture
def service(operator_release: NodeRelease) -> Iterator[NodeService]:
    """The sample, just applied."""
    with restricted_namespace(operator_release.node) as namespace:
        service = NodeService(operator_release.node, namespace, "vllm-cpu")
        service.kubectl("apply", "-f", str(sample_path("vllm-cpu.yaml")))
        yield service
        service.delete()


@pytest.mark.usefixtures("vllm_image")
def test_the_vllm_sample_serves_without_a_restart_and_writes_only_where_it_may(service: NodeService) -> None:
    service.wait_for("Ready", within_s=STARTED_S)
    (pod,) = service.pods("colocated")
    assert [status["restartCount"] for status in pod["status"]["containerStatuses"]] == [0]
    done = service.ask("smollm2-135m-instruct", "The capital of France is", "5")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completion_tokens"] == 5
