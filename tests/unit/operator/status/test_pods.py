"""What keeps a role's pods from being ready, and how they are told while their number is on its way."""

from __future__ import annotations

from typing import Any

import pytest

from flowprefill_operator.apply import Applied, Failure
from flowprefill_operator.kinds import CLAIMS
from flowprefill_operator.scene import scene
from flowprefill_operator.status.compute import as_json, status_of
from flowprefill_operator.status.pods import role_verdict
from flowprefill_operator.status.verdict import Verdict
from flowprefill_operator.status.view import Reports, View
from support.cluster_objects import (
    ended,
    pod_status,
    refused,
    running,
    terminated,
    unschedulable,
    waiting,
)
from support.conditions import NOW, conditions, prefill_pod, starting, told, view
from support.simulated_cluster import UID, SimulatedCluster

REPLICAS = 2


def counted(**status: Any) -> tuple[Verdict, dict[str, Any]]:
    """The verdict about the prefill pods and what `status.roles.prefill` says, when 2 are asked for and a Deployment
    counts like this."""
    cluster = SimulatedCluster(1)
    revision = cluster.ask({"prefill": {"replicas": REPLICAS}})
    cluster.settle()
    deployment = cluster.deployment("prefill", revision)
    assert deployment is not None
    deployment["status"] |= status
    deployment["metadata"]["resourceVersion"] = "9999"
    cluster.hear()
    shown = View(
        service=cluster.service,
        now="2026-03-01T12:00:00Z",
        scene=scene(cluster.observed(), UID),
        goal=cluster.goal(),
        applied=None,
    )
    return role_verdict(shown, "prefill", revision), as_json(status_of(shown))["roles"]["prefill"]


@pytest.mark.parametrize(
    ("status", "message"),
    [
        pytest.param(
            {"replicas": 4, "updatedReplicas": 4, "readyReplicas": 4},
            "2 of 2 pods are ready, and 2 more are still to go",
            id="fewer are asked for",
        ),
        pytest.param(
            {"replicas": 3, "updatedReplicas": 2, "readyReplicas": 3},
            "2 of 2 pods are ready, and 1 more is still to go",
            id="the last old one has not gone",
        ),
        pytest.param(
            {"replicas": 3, "updatedReplicas": 1, "readyReplicas": 2},
            "2 of 2 pods are ready, and 1 is still to be replaced",
            id="half are of the old template",
        ),
        pytest.param(
            {"observedGeneration": 0},
            "2 of 2 pods are ready, and the last change has not reached them yet",
            id="the Deployment's controller has not looked yet",
        ),
        pytest.param(
            {"replicas": 1, "updatedReplicas": 1, "readyReplicas": 1},
            "1 of 2 pods are ready",
            id="one is not made yet",
        ),
    ],
)
def test_what_keeps_a_role_waiting_is_told_beside_the_number_of_ready_pods(
    status: dict[str, int], message: str
) -> None:
    verdict, _ = counted(**status)
    assert (verdict.status, verdict.reason, verdict.message) == ("False", "PodsStarting", message)


def test_no_more_pods_are_told_as_ready_than_are_asked_for() -> None:
    verdict, role = counted(replicas=2, updatedReplicas=2, readyReplicas=4)
    assert (verdict.status, verdict.message) == ("True", "2 of 2 pods are ready")
    assert (role["readyReplicas"], role["replicas"], role["summary"]) == (2, 2, "2/2")


def test_a_deployment_that_is_not_made_because_of_another_object_says_so() -> None:
    cluster = SimulatedCluster(1)
    cluster.ask()
    cluster.settle()
    new = cluster.ask({"engine": {"kvCacheTokens": 4096}})
    error = refused(422, "Invalid", "spec is immutable")
    blocked = Applied(writes=0, failures=(Failure(kind=CLAIMS, name="example-model-cache", error=error),))
    messages = {
        applied: role_verdict(
            View(
                service=cluster.service,
                now="2026-03-01T12:00:00Z",
                scene=scene(cluster.observed(), UID),
                goal=cluster.goal(),
                applied=applied,
            ),
            "prefill",
            new,
        ).message
        for applied in (Applied(writes=0, failures=()), blocked)
    }
    assert list(messages.values()) == [
        f"revision {new} has no Deployment yet",
        f"revision {new} has no Deployment yet; it is made once the objects before it could be applied",
    ]


PODS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "an image that cannot be pulled": (
        pod_status(waiting("ImagePullBackOff", 'Back-off pulling image "nowhere/x:1"', name="prefill")),
        "ImagePullFailed",
        "Failed",
        'container prefill: ImagePullBackOff: Back-off pulling image "nowhere/x:1"',
    ),
    "an image name that is none": (
        pod_status(waiting("InvalidImageName", "couldn't parse image name")),
        "ImagePullFailed",
        "Failed",
        "couldn't parse image name",
    ),
    "an image of an init container": (
        pod_status(waiting("PodInitializing"), init=(waiting("ErrImagePull", "not found", name="model"),)),
        "ImagePullFailed",
        "Failed",
        "container model: ErrImagePull: not found",
    ),
    "a secret that is not there": (
        pod_status(waiting("CreateContainerConfigError", 'secret "hub" not found')),
        "SecretMissing",
        "Failed",
        'secret "hub" not found',
    ),
    "a key that is not in its secret": (
        pod_status(waiting("CreateContainerConfigError", "couldn't find key token in Secret ns/hub")),
        "ContainerConfigError",
        "Failed",
        "couldn't find key token in Secret ns/hub",
    ),
    "a config map that is not there": (
        pod_status(waiting("CreateContainerConfigError", 'configmap "more" not found')),
        "ContainerConfigError",
        "Failed",
        'configmap "more" not found',
    ),
    "a crash loop": (
        pod_status(
            waiting(
                "CrashLoopBackOff", "back-off 10s", restarts=4, last=terminated(1, "Error", "no such model\n")
            ),
            phase="Running",
        ),
        "CrashLoop",
        "Failed",
        "has ended 4 times, last with status 1 (Error no such model)",
    ),
    "a container that has just ended again": (
        pod_status(ended(137, "OOMKilled", restarts=1), phase="Running"),
        "CrashLoop",
        "Failed",
        "has ended 1 times, last with status 137 (OOMKilled)",
    ),
    "a model download that fails": (
        pod_status(
            waiting("PodInitializing"),
            init=(waiting("CrashLoopBackOff", restarts=2, name="model", last=terminated(2)),),
        ),
        "CrashLoop",
        "Failed",
        "container model has ended 2 times, last with status 2",
    ),
    "no node": (
        unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
        "Unschedulable",
        "InProgress",
        "has no node: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    ),
    "a model that is being fetched": (
        pod_status(waiting("PodInitializing"), init=(running(name="model"),)),
        "FetchingModel",
        "InProgress",
        "fetches the model",
    ),
    "a model that is being loaded": (
        pod_status(running(), phase="Running"),
        "LoadingModel",
        "InProgress",
        "runs and is not ready yet",
    ),
    "a server that loads again after a crash": (
        pod_status(running(restarts=1, last=terminated(1)), phase="Running"),
        "LoadingModel",
        "InProgress",
        "runs and is not ready yet",
    ),
    "a pod that was evicted": (
        {"phase": "Failed", "reason": "Evicted"},
        "PodFailed",
        "InProgress",
        "is replaced",
    ),
    "a pod that is new": ({"phase": "Pending"}, "PodsStarting", "InProgress", "is being started"),
    "a container that is being created": (
        pod_status(waiting("ContainerCreating")),
        "PodsStarting",
        "InProgress",
        "is being started",
    ),
}


@pytest.mark.parametrize("case", PODS)
def test_what_keeps_a_pod_from_being_ready_is_told_by_its_role_and_by_ready(case: str) -> None:
    status, reason, progress, message = PODS[case]
    cluster, revision = starting()
    name = prefill_pod(cluster, revision, status)
    shown = view(cluster)
    assert told(shown, "PrefillReady") == ("False", reason, progress)
    assert told(shown) == ("False", reason, progress)
    text = conditions(shown)["Ready"].message
    assert text.startswith("PrefillReady: 0 of 1 pods are ready; ")
    assert name in text
    assert message in text


@pytest.mark.parametrize(
    ("note", "reason"),
    [
        ('MountVolume.SetUp failed for volume "api-keys" : secret "keys" not found', "SecretMissing"),
        ('MountVolume.SetUp failed for volume "profile" : configmap "p" not found', "VolumeNotMounted"),
    ],
)
def test_a_volume_that_cannot_be_mounted_is_told(note: str, reason: str) -> None:
    cluster, revision = starting()
    name = prefill_pod(cluster, revision, pod_status(waiting("ContainerCreating")))
    shown = view(cluster, reports=Reports(mounts={name: note}))
    assert told(shown, "PrefillReady")[:2] == ("False", reason)
    assert note in conditions(shown)["PrefillReady"].message


def test_of_several_pods_the_worst_is_told() -> None:
    cluster, revision = starting({"prefill": {"replicas": 3}})
    first, second, third = cluster.members("prefill", revision)
    first["status"] = pod_status(running(), phase="Running")
    second["status"] = pod_status(waiting("ImagePullBackOff", "no such tag"))
    third["status"] = unschedulable("no room")
    assert told(view(cluster), "PrefillReady") == ("False", "ImagePullFailed", "Failed")


def test_a_pod_that_stops_and_one_of_another_revision_are_not_what_keeps_a_role_waiting() -> None:
    cluster, revision = starting({"prefill": {"replicas": 2}})
    first, second = cluster.members("prefill", revision)
    first["status"] = pod_status(waiting("ImagePullBackOff"))
    first["metadata"]["deletionTimestamp"] = NOW
    second["status"] = pod_status(running(), phase="Running")
    assert told(view(cluster), "PrefillReady")[1] == "LoadingModel"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('pods "p" is forbidden: exceeded quota: small, requested: pods=1, used: pods=3', "QuotaExceeded"),
        ('pods "p" is forbidden: failed quota: small: must specify limits.cpu', "QuotaExceeded"),
        (
            'pods "p" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot',
            "PodSecurityViolation",
        ),
        ('admission webhook "policy.example" denied the request: no', "AdmissionDenied"),
    ],
)
def test_pods_that_are_not_admitted_are_told_by_their_role(message: str, reason: str) -> None:
    cluster, revision = starting()
    deployment = cluster.deployment("decode", revision)
    assert deployment is not None
    deployment["status"]["conditions"] = [
        {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}
    ]
    assert told(view(cluster), "DecodeReady") == ("False", reason, "Failed")
    assert message in conditions(view(cluster))["DecodeReady"].message


def test_a_pod_that_is_ready_is_not_what_keeps_a_role_waiting() -> None:
    cluster, revision = starting({"prefill": {"replicas": 2}})
    first, second = cluster.members("prefill", revision)
    first["status"] = pod_status(running(ready=True), phase="Running", ready=True)
    second["status"] = {"phase": "Pending"}
    assert told(view(cluster), "PrefillReady")[1] == "PodsStarting"
