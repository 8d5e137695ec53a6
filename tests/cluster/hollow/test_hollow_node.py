"""The hollow node against the real controllers: its pods look to them as a kubelet's would."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from support.control_plane.hollow import HollowNode
from support.control_plane.hollow_behaviour import (
    Behaviour,
    Completes,
    ConfigFails,
    CrashLoops,
    Evicted,
    ImagePullFails,
    Initializes,
    MountFails,
    NeverReady,
    Runs,
)
from support.control_plane.plane import ControlPlane
from support.control_plane.waiting import until


def deployment(name: str, replicas: int, *, init: bool = False) -> dict[str, Any]:
    labels = {"app": name}
    container = {"name": "main", "image": "nowhere.example/web:1"}
    spec: dict[str, Any] = {"containers": [container], "terminationGracePeriodSeconds": 30}
    if init:
        spec["initContainers"] = [container | {"name": "model"}, container | {"name": "second"}]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def apply(plane: ControlPlane, namespace: str, body: dict[str, Any]) -> None:
    plane.kubectl("apply", "--server-side", "-n", namespace, "-f", "-", stdin=json.dumps(body))


def pods(plane: ControlPlane, namespace: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = plane.get("pods", "-n", namespace)["items"]
    return found


def test_a_deployment_of_many_pods_is_rolled_out_and_each_pod_has_an_address(
    plane: ControlPlane, node: HollowNode, namespace: str
) -> None:
    apply(plane, namespace, deployment("web", 100))
    plane.kubectl("rollout", "status", "-n", namespace, "deployment/web", "--timeout=60s")
    addresses = {pod["status"]["podIP"] for pod in pods(plane, namespace)}
    assert len(addresses) == 100
    assert all(address.startswith("127.") for address in addresses)
    plane.kubectl("scale", "-n", namespace, "deployment/web", "--replicas=3")
    until(lambda: len(pods(plane, namespace)) == 3, "97 pods are gone")


@pytest.mark.parametrize(
    ("behaviour", "shown"),
    [
        (Runs(), "Running"),
        (NeverReady(), "Running"),
        (ImagePullFails(), "ImagePullBackOff"),
        (ImagePullFails(reason="ErrImageNeverPull"), "ErrImageNeverPull"),
        (ConfigFails(), "CreateContainerConfigError"),
        (MountFails(), "ContainerCreating"),
        (CrashLoops(message="no such model", exit_code=3, restarts=5), "CrashLoopBackOff"),
        (Completes(exit_code=0), "Completed"),
        (Completes(exit_code=4), "Error"),
        (Evicted(), "Evicted"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_kubectl_shows_each_behaviour_as_it_shows_it_of_a_kubelet(
    plane: ControlPlane, node: HollowNode, namespace: str, behaviour: Behaviour, shown: str
) -> None:
    node.behave(behaviour, namespace=namespace)
    pod = deployment("web", 1)["spec"]["template"] | {"apiVersion": "v1", "kind": "Pod"}
    pod["metadata"] = {"name": "web"}
    apply(plane, namespace, pod)

    def column() -> list[str]:
        return plane.kubectl("get", "pod", "web", "-n", namespace, "--no-headers").stdout.split()

    until(lambda: column()[2] == shown, f"{shown}, not {column()}")
    assert column()[1] == ("1/1" if behaviour == Runs() else "0/1")


def test_a_pod_waits_for_its_init_container(plane: ControlPlane, node: HollowNode, namespace: str) -> None:
    rule = node.behave(Initializes(), namespace=namespace)
    apply(plane, namespace, deployment("web", 1, init=True))

    def shown() -> str:
        lines = plane.kubectl("get", "pods", "-n", namespace, "--no-headers").stdout.split()
        return lines[2] if lines else ""

    until(lambda: shown() == "Init:0/2", "Init:0/2")
    node.forget(rule)
    plane.kubectl("rollout", "status", "-n", namespace, "deployment/web", "--timeout=60s")


def test_a_crash_says_its_code_its_last_words_and_how_often(
    plane: ControlPlane, node: HollowNode, namespace: str
) -> None:
    node.behave(CrashLoops(message="no such model", exit_code=3, restarts=5), namespace=namespace)
    apply(plane, namespace, deployment("web", 1))

    def restarts() -> int:
        found = [c for pod in pods(plane, namespace) for c in pod["status"].get("containerStatuses", ())]
        return int(found[0]["restartCount"]) if found else 0

    until(lambda: restarts() == 5, "5 restarts")
    (status,) = pods(plane, namespace)[0]["status"]["containerStatuses"]
    ended = status["lastState"]["terminated"]
    assert (ended["exitCode"], ended["message"]) == (3, "no such model")


def test_readiness_is_lost_and_comes_back(plane: ControlPlane, node: HollowNode, namespace: str) -> None:
    apply(plane, namespace, deployment("web", 2))
    plane.kubectl("rollout", "status", "-n", namespace, "deployment/web", "--timeout=60s")
    rule = node.behave(NeverReady(), namespace=namespace)
    wait = ("wait", "-n", namespace, "deployment/web", "--timeout=60s")
    plane.kubectl(*wait, "--for=condition=Available=False")
    node.forget(rule)
    plane.kubectl(*wait, "--for=condition=Available=True")


def test_a_job_ends_as_its_pod_does(plane: ControlPlane, node: HollowNode, namespace: str) -> None:
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "fit"},
        "spec": {
            "backoffLimit": 0,
            "template": {
                "spec": {"restartPolicy": "Never", "containers": [{"name": "fit", "image": "x"}]},
            },
        },
    }
    node.behave(Completes(exit_code=0, message='{"fit": 1}'), namespace=namespace)
    apply(plane, namespace, job)
    plane.kubectl("wait", "-n", namespace, "job/fit", "--for=condition=Complete", "--timeout=60s")
    (pod,) = pods(plane, namespace)
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"] == '{"fit": 1}'
    node.behave(Completes(exit_code=1), namespace=namespace)
    apply(plane, namespace, job | {"metadata": {"name": "unfit"}})
    plane.kubectl("wait", "-n", namespace, "job/unfit", "--for=condition=Failed", "--timeout=60s")


def test_a_deleted_pod_stays_until_the_case_lets_it_go(
    plane: ControlPlane, node: HollowNode, namespace: str
) -> None:
    rule = node.behave(Runs(), namespace=namespace, stops_after_s=None)
    apply(plane, namespace, deployment("web", 1))
    plane.kubectl("rollout", "status", "-n", namespace, "deployment/web", "--timeout=60s")
    plane.kubectl("delete", "-n", namespace, "deployment/web")
    until(lambda: "deletionTimestamp" in pods(plane, namespace)[0]["metadata"], "the pod is being deleted")
    node.forget(rule)
    until(lambda: not pods(plane, namespace), "the pod is gone")


def test_a_claim_gets_a_volume(plane: ControlPlane, node: HollowNode, namespace: str) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "models"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "50Gi"}}},
    }
    apply(plane, namespace, claim)
    plane.kubectl(
        "wait", "-n", namespace, "pvc/models", "--for=jsonpath={.status.phase}=Bound", "--timeout=60s"
    )


def test_a_pods_admin_port_answers_only_while_it_runs(
    plane: ControlPlane, node: HollowNode, namespace: str
) -> None:
    body = deployment("web", 1)
    template = body["spec"]["template"]
    labels = {"flowprefill.io/service": "s", "flowprefill.io/role": "decode", "flowprefill.io/revision": "r1"}
    template["metadata"]["labels"] |= labels
    template["spec"]["containers"][0]["ports"] = [{"name": "admin", "containerPort": 9000}]
    template["spec"]["volumes"] = [{"name": "live", "configMap": {"name": "s-live"}}]
    live = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "s-live", "labels": {"flowprefill.io/service": "s"}},
        "data": {"live.json": '{"generation": 7}'},
    }
    apply(plane, namespace, live)
    apply(plane, namespace, body)
    plane.kubectl("rollout", "status", "-n", namespace, "deployment/web", "--timeout=60s")
    address = pods(plane, namespace)[0]["status"]["podIP"]

    def config() -> Any:
        try:
            return httpx.get(f"http://{address}:9000/v1/config", trust_env=False).json()
        except httpx.TransportError:
            return None

    until(lambda: config() == {"role": "decode", "revision": "r1", "generation": 7}, "generation 7")
    node.admin.lagging.add((namespace, "s"))
    apply(plane, namespace, live | {"data": {"live.json": '{"generation": 8}'}})
    assert config()["generation"] == 7
    node.admin.lagging.clear()
    until(lambda: config()["generation"] == 8, "generation 8")
    node.behave(CrashLoops(), namespace=namespace)
    until(lambda: config() is None, "a crashed pod refuses connections")
