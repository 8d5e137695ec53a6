"""The sample with vLLM, on a node without GPUs: its image, read-only root, volumes, probes and ports."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import yaml

from flowprefill_crd.samples import sample_path
from support.control_plane.images import Image
from support.control_plane.node_pods import restricted_namespace
from support.control_plane.node_release import NodeRelease
from support.control_plane.node_service import NodeService

STARTED_S = 900.0
"""vLLM on two busy cores, which a second program may have a part of."""


@pytest.fixture
def service(vllm_image: Image, operator_release: NodeRelease) -> Iterator[NodeService]:
    """A namespace for the sample."""
    with restricted_namespace(operator_release.node) as namespace:
        service = NodeService(operator_release.node, namespace, "vllm-cpu")
        yield service
        service.delete()


def test_the_vllm_sample_serves_without_a_restart_and_writes_only_where_it_may(service: NodeService) -> None:
    service.kubectl("apply", "-f", str(sample_path("vllm-cpu.yaml")))
    service.wait_for("Ready", within_s=STARTED_S)
    (pod,) = service.pods("colocated")
    assert [status["restartCount"] for status in pod["status"]["containerStatuses"]] == [0]
    done = service.ask("smollm2-135m-instruct", "The capital of France is", "5")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completion_tokens"] == 5


def test_prefill_and_decode_pods_of_vllm_pass_kv_from_pod_to_pod(service: NodeService) -> None:
    """Ready needs one token that went through both."""
    body = yaml.safe_load(sample_path("vllm-cpu.yaml").read_text())
    body["spec"]["mode"] = "Disaggregated"
    resources = {"requests": {"cpu": "100m", "memory": "2Gi"}, "limits": {"nvidia.com/gpu": 0}}
    body["spec"]["prefill"]["resources"] = body["spec"]["decode"]["resources"] = resources
    service.apply(body)
    service.wait_for("Ready", within_s=STARTED_S)
    prompt = "The capital of France is Paris, and the capital of Italy is Rome. The capital of Spain is"
    done = service.ask("smollm2-135m-instruct", prompt, "5")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completion_tokens"] == 5
