"""A prefill pod that is killed while it works on a request. The tests follow each other on one service."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from flowprefill_crd.samples import sample_path
from support.control_plane.node_pods import restricted_namespace
from support.control_plane.node_release import NodeRelease
from support.control_plane.node_service import NodeService
from support.control_plane.waiting import until

WORDS = ("river", "bridge", "lantern", "compass", "harbour", "meadow", "glacier", "violin")
ANSWER_S = 150.0


@pytest.fixture(scope="module")
def service(operator_release: NodeRelease) -> Iterator[NodeService]:
    """The quickstart sample with two prefill pods, Ready."""
    with restricted_namespace(operator_release.node) as namespace:
        service = NodeService(operator_release.node, namespace, "quickstart")
        body = yaml.safe_load(sample_path("quickstart.yaml").read_text("utf-8"))
        body["spec"]["prefill"] |= {
            "replicas": 2,
            "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}},
        }
        service.apply(body)
        service.wait_ready()
        yield service
        service.delete()


def _long_request(seed: int) -> dict[str, Any]:
    """A request whose prefill takes seconds."""
    draw = random.Random(seed)
    prompt = " ".join(draw.choice(WORDS) for _ in range(2500))
    return {"model": "smollm2-135m-instruct", "prompt": prompt, "max_tokens": 2, "ignore_eos": True}


def _working(service: NodeService) -> dict[str, Any] | None:
    """A prefill pod that a request is at."""
    (proxy,) = service.pods("proxy")
    for pod in service.pods("prefill"):
        labels = {"role": "prefill", "pod": pod["metadata"]["name"]}
        if service.metric(proxy, "flowprefill_proxy_outstanding_requests", **labels) > 0:
            return pod
    return None


def test_a_request_without_a_token_yet_succeeds_on_another_pod(service: NodeService) -> None:
    answer = service.post(_long_request(1))
    pod = until(lambda: _working(service), "a pod with the request", within_s=20.0)
    assert answer.poll() is None, "the answer came before the pod could be killed"
    service.node.kill(pod)
    head, _, body = answer.communicate(timeout=ANSWER_S)[0].partition("\n")
    assert head.split()[1] == "200", body
    assert '"completion_tokens":2' in body.replace(" ", "")
    (proxy,) = service.pods("proxy")
    assert service.metric(proxy, "flowprefill_proxy_leg_retries_total", leg="prefill") == 1
    service.wait_ready()


def test_with_one_pod_the_request_waits_for_it_or_is_told_when_to_come_again(service: NodeService) -> None:
    service.change({"prefill": {"replicas": 1}})
    until(lambda: len(service.pods("prefill")) == 1, "1 prefill pod")
    answer = service.post(_long_request(2))
    pod = until(lambda: _working(service), "the pod with the request", within_s=20.0)
    assert answer.poll() is None, "the answer came before the pod could be killed"
    service.node.kill(pod)
    said = answer.communicate(timeout=ANSWER_S)[0]
    head, _, body = said.partition("\n\n")
    status = head.split()[1]
    if status == "200":
        assert '"completion_tokens":2' in body.replace(" ", "")
    else:
        assert status == "503", said
        assert "retry-after:" in head.lower()
    service.wait_ready()
