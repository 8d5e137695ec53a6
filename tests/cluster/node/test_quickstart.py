"""The life of crds/samples/quickstart.yaml on a real node: installed by helm, applied by kubectl, asked by its clients.

The tests follow each other on one service, which every one of them leaves Ready.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from flowprefill_crd.samples import sample_path
from flowprefill_operator.kinds import OWNED
from support.control_plane.node_pods import restricted_namespace
from support.control_plane.node_release import NAMESPACE, RELEASE, NodeRelease
from support.control_plane.node_service import NodeService
from support.control_plane.waiting import until
from support.steady_load import Outcome

RATE = 0.5
"""Short requests a second, beside the load's two long streams and its long prefill: well below what two cores hold."""
MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def quickstart(operator_release: NodeRelease) -> Iterator[NodeService]:
    """The sample, Ready."""
    with restricted_namespace(operator_release.node) as namespace:
        service = NodeService(operator_release.node, namespace, "quickstart")
        service.kubectl("apply", "-f", str(sample_path("quickstart.yaml")))
        service.wait_ready()
        yield service
        service.delete()


def _failed(outcomes: list[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.failure is not None]


def test_helm_test_passes(operator_release: NodeRelease) -> None:
    said = operator_release.helm("test", RELEASE, "--namespace", NAMESPACE).stdout
    assert "Phase:          Succeeded" in said


def test_a_completion_streams_from_the_services_name(quickstart: NodeService) -> None:
    host = f"quickstart-proxy.{quickstart.namespace}.svc"
    assert quickstart.url == f"http://{host}:8000/v1"
    done = quickstart.ask(MODEL, "The capital of France is", "6")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["completion_tokens"] == 6
    assert answer["finish_reason"] == "length"
    assert answer["num_chunks"] > 1, "the answer came in one piece"
    assert "Paris" in answer["text"]


def test_get_shows_a_ready_service(quickstart: NodeService) -> None:
    header, row = quickstart.kubectl("get", "fps", "quickstart").splitlines()
    columns = dict(zip(header.split(), row.split(), strict=False))
    assert (columns["READY"], columns["PREFILL"], columns["DECODE"]) == ("True", "1/1", "1/1")


def test_a_changed_class_reaches_running_pods(quickstart: NodeService) -> None:
    before = quickstart.lives()
    classes = quickstart.get()["spec"]["sloClasses"]
    classes[0]["ttftMilliseconds"] = 1500
    quickstart.change({"sloClasses": classes})
    quickstart.wait_for("ConfigApplied", within_s=120.0)
    assert quickstart.get()["status"]["sloAttainment"][0]["ttftMilliseconds"] == 1500
    assert quickstart.lives() == before


def test_smaller_pods_take_the_place_of_the_old_ones(quickstart: NodeService) -> None:
    before = quickstart.lives()
    small = {"resources": {"requests": {"cpu": "100m"}}}  # what follows needs room for more pods
    quickstart.change({"prefill": small, "decode": small})
    quickstart.wait_ready()
    _check_that_workers_are_new(quickstart, before)


def test_a_rolling_update_fails_no_request(quickstart: NodeService, tmp_path: Path) -> None:
    before = quickstart.lives()
    with quickstart.load(tmp_path / "outcomes", rate=RATE) as outcomes:
        quickstart.change({"engine": {"kvCacheTokens": 12288}})
        quickstart.wait_ready()
    _check_that_workers_are_new(quickstart, before)
    assert len(outcomes) > 10
    assert not _failed(outcomes)


def _check_that_workers_are_new(service: NodeService, before: dict[str, int]) -> None:
    workers = service.lives("prefill") | service.lives("decode")
    assert len(workers) == 2
    assert not set(workers) & set(before)


def test_scaling_up_and_evicting_and_scaling_down_fails_no_request(
    quickstart: NodeService, tmp_path: Path
) -> None:
    with quickstart.load(tmp_path / "outcomes", rate=RATE) as outcomes:
        quickstart.change({"prefill": {"replicas": 2}})
        until(lambda: quickstart.get()["status"]["roles"]["prefill"]["readyReplicas"] == 2, "2 prefill pods")
        evicted = quickstart.pods("prefill")[0]["metadata"]
        _evict(quickstart, evicted["name"])
        until(
            lambda: (
                evicted["uid"] not in quickstart.lives("prefill")
                and quickstart.get()["status"]["roles"]["prefill"]["readyReplicas"] == 2
            ),
            "another pod in the place of the evicted one",
            within_s=200.0,
        )
        quickstart.change({"prefill": {"replicas": 1}})
        until(lambda: len(quickstart.pods("prefill")) == 1, "1 prefill pod")
    assert not _failed(outcomes)


def test_an_operator_restart_fails_no_request_and_restarts_no_pod(
    quickstart: NodeService, operator_release: NodeRelease, tmp_path: Path
) -> None:
    before = quickstart.lives()
    with quickstart.load(tmp_path / "outcomes", rate=RATE) as outcomes:
        operator_release.restart()
        quickstart.change(
            {"sloClasses": [{**c, "weight": 2} for c in quickstart.get()["spec"]["sloClasses"]]}
        )
        quickstart.wait_for("ConfigApplied", within_s=120.0)
    assert not _failed(outcomes)
    assert quickstart.lives() == before


def test_a_deleted_service_takes_everything_with_it(operator_release: NodeRelease) -> None:
    with restricted_namespace(operator_release.node) as namespace:
        service = NodeService(operator_release.node, namespace, "leaves")
        body = yaml.safe_load(sample_path("quickstart.yaml").read_text("utf-8"))
        body["metadata"]["name"] = "leaves"
        body["spec"]["engine"]["type"] = "simulated"
        for role in ("prefill", "decode"):
            body["spec"][role]["resources"] = {"requests": {"cpu": "50m"}}
        service.apply(body)
        service.wait_ready()
        assert "finalizers" not in service.get()["metadata"]
        kinds = ",".join(kind.resource for kind in OWNED if not kind.optional)
        of_the_service = ("get", kinds, "-l", "flowprefill.io/service=leaves", "-o", "name")
        assert service.kubectl(*of_the_service)
        service.delete()
        until(lambda: not service.kubectl(*of_the_service), "no object of the service")


def _evict(service: NodeService, pod: str) -> None:
    """Ask for the eviction of a pod, as `kubectl drain` does."""
    path = f"/api/v1/namespaces/{service.namespace}/pods/{pod}/eviction"
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": service.namespace},
    }
    service.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))
