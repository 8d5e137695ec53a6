"""Conditions in every situation, read as `kubectl wait` and kstatus read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from flowprefill_crd import Status
from flowprefill_crd.v1alpha1 import Condition
from flowprefill_operator.apply import Applied, Failure, NameConflict
from flowprefill_operator.cluster.errors import ClusterError, no_answer
from flowprefill_operator.controller.events import transitions
from flowprefill_operator.kinds import CONFIG_MAPS, DEPLOYMENTS, Kind
from flowprefill_operator.scene import scene
from flowprefill_operator.status.compute import status_of
from flowprefill_operator.status.view import Reports, View
from support.cluster_objects import (
    ended,
    pod_status,
    quota_error,
    rbac_error,
    refused,
    running,
    terminated,
    unschedulable,
    waiting,
)
from support.services import Spec, merged
from support.simulated_cluster import UID, SimulatedCluster

NOW = "2026-03-01T12:00:00Z"
OTHER: Spec = {"engine": {"kvCacheTokens": 4096}}
EVERY_POD = object()
"""Stands for reports in which every pod follows the live document."""


def view(cluster: SimulatedCluster, **changes: Any) -> View:
    """What the operator knows right now; with all pods on the live document of generation 1, unless told otherwise."""
    cluster.hear()
    now = scene(cluster.observed(), UID)
    reports = changes.pop("reports", Reports(generations={item.name: 1 for item, _ in now.pods}))
    return View(
        service=changes.pop("service", cluster.service),
        now=NOW,
        scene=now,
        goal=changes.pop("goal", cluster.goal()),
        applied=changes.pop("applied", Applied(writes=0, failures=())),
        reports=replace(reports, proven=frozenset(cluster.proven)),
        **changes,
    )


def conditions(of: View) -> dict[str, Condition]:
    return {c.type: c for c in status_of(of).conditions}


def kstatus(status: Status, generation: int) -> str:
    """As cli-utils computes it for a kind that it does not know (kstatus/status/generic.go, README)."""
    told = {c.type: c.status for c in status.conditions}
    if status.observed_generation != generation:
        return "InProgress"
    if told.get("Stalled") == "True":
        return "Failed"
    if told.get("Reconciling") == "True" or told["Ready"] != "True":
        return "InProgress"
    return "Current"


def told(of: View, name: str = "Ready") -> tuple[str, str, str]:
    """A condition's status and reason, and what kstatus makes of it all."""
    status = status_of(of)
    found = conditions(of)[name]
    return found.status, found.reason, kstatus(status, of.service.metadata.generation)


def serving(changes: Spec | None = None) -> tuple[SimulatedCluster, str]:
    cluster = SimulatedCluster(1)
    revision = cluster.ask(changes)
    cluster.settle()
    return cluster, revision


def starting(changes: Spec | None = None) -> tuple[SimulatedCluster, str]:
    """A service whose worker pods do not get ready."""
    cluster = SimulatedCluster(1)
    revision = cluster.ask(changes)
    cluster.sick.add(revision)
    cluster.settle()
    return cluster, revision


def prefill_pod(cluster: SimulatedCluster, revision: str, status: Mapping[str, Any]) -> str:
    """Give the first prefill pod a status; its name."""
    pod = cluster.members("prefill", revision)[0]
    pod["status"] = dict(status)
    pod["metadata"]["resourceVersion"] = "9999"
    return str(pod["metadata"]["name"])


def test_a_service_that_serves_has_every_condition_of_its_parts_and_no_other() -> None:
    cluster, _ = serving()
    found = conditions(view(cluster))
    assert list(found) == [
        "Ready",
        "Accepted",
        "ObjectsApplied",
        "PrefillReady",
        "DecodeReady",
        "ProxyReady",
        "RolloutComplete",
        "ConfigApplied",
        "Available",
    ]
    assert {c.status for c in found.values()} == {"True"}
    assert told(view(cluster)) == ("True", "Serving", "Current")


def test_a_colocated_service_has_no_condition_about_decode_pods() -> None:
    cluster, _ = serving({"mode": "Colocated"})
    found = conditions(view(cluster))
    assert "DecodeReady" not in found
    assert found["PrefillReady"].status == "True"
    assert told(view(cluster)) == ("True", "Serving", "Current")


def test_a_service_that_asks_for_a_profiling_job_has_a_condition_about_it() -> None:
    cluster = SimulatedCluster(1)
    cluster.healthy = False
    cluster.ask({"scheduling": {"predictor": {"profilingJob": True}}})
    cluster.settle()
    assert told(view(cluster), "ProfileReady") == ("False", "Profiling", "InProgress")
    waits = conditions(view(cluster))["PrefillReady"]
    assert (waits.reason, waits.message) == ("PodsStarting", "waits for the profiling Job")
    (job,) = [item for (kind, _), item in cluster.objects.items() if kind.kind == "Job"]
    job["status"] = {
        "conditions": [
            {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "3 tries"}
        ]
    }
    job["metadata"]["resourceVersion"] = "9999"
    assert told(view(cluster), "ProfileReady") == ("False", "ProfilingFailed", "Failed")
    assert "BackoffLimitExceeded: 3 tries" in conditions(view(cluster))["Ready"].message
    del job["status"]
    cluster.healthy = True
    cluster.settle()
    assert told(view(cluster), "ProfileReady") == ("True", "Profiled", "Current")


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


def failing(error: ClusterError, kind: Kind = CONFIG_MAPS, name: str = "example-live") -> Applied:
    return Applied(writes=0, failures=(Failure(kind=kind, name=name, error=error),))


CONFLICT = NameConflict(
    verb="patch",
    resource="configmaps",
    status=409,
    reason="NameConflict",
    message='"example-live" exists already and does not belong to this service',
)
GOING = NameConflict(
    verb="patch", resource="configmaps", status=409, reason="BeingDeleted", message="of an earlier owner"
)

FAILURES: dict[str, tuple[ClusterError, str, str]] = {
    "a right is missing": (rbac_error("patch", "configmaps"), "Forbidden", "Failed"),
    "a quota": (quota_error("x"), "QuotaExceeded", "Failed"),
    "the namespace goes away": (
        refused(
            403, "Forbidden", "unable to create new content in namespace ns because it is being terminated"
        ),
        "NamespaceTerminating",
        "Failed",
    ),
    "a webhook": (
        refused(403, "Forbidden", 'admission webhook "policy.example" denied the request: no'),
        "AdmissionDenied",
        "Failed",
    ),
    "the object is not acceptable": (
        refused(422, "Invalid", 'Deployment.apps "x" is invalid: spec.template: Required value'),
        "InvalidObject",
        "Failed",
    ),
    "the name is taken": (CONFLICT, "NameConflict", "Failed"),
    "the name is becoming free": (GOING, "BeingDeleted", "InProgress"),
    "somebody wrote at the same time": (
        refused(409, "Conflict", "the object changed"),
        "Conflict",
        "InProgress",
    ),
    "too many requests": (refused(429, "TooManyRequests", "slow down"), "APIUnavailable", "InProgress"),
    "an internal error": (
        refused(500, "InternalError", "etcdserver: timeout"),
        "APIUnavailable",
        "InProgress",
    ),
    "no answer": (no_answer("patch", "configmaps", TimeoutError()), "APIUnavailable", "InProgress"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_why_an_object_is_not_as_planned_is_told(case: str) -> None:
    error, reason, progress = FAILURES[case]
    cluster, _ = serving()
    shown = view(cluster, applied=failing(error))
    assert told(shown, "ObjectsApplied") == ("False", reason, progress)
    assert told(shown) == ("False", reason, progress)
    assert error.message in conditions(shown)["ObjectsApplied"].message
    assert conditions(shown)["Available"].status == "True"


def test_a_missing_right_is_named_by_verb_and_resource() -> None:
    cluster, _ = serving()
    message = conditions(view(cluster, applied=failing(rbac_error("patch", "deployments.apps"))))[
        "Ready"
    ].message
    assert "may not patch deployments.apps" in message


def test_further_failures_are_named() -> None:
    cluster, _ = serving()
    first, second = failing(quota_error("x")).failures[0], failing(CONFLICT).failures[0]
    shown = view(cluster, applied=Applied(writes=0, failures=(first, second, second)))
    what = f"{second.kind.kind} {second.name}"
    assert conditions(shown)["ObjectsApplied"].message.endswith(f"; also {what}, {what}")


def test_a_deployment_that_cannot_be_applied_is_told_by_its_role() -> None:
    cluster, revision = starting()
    failure = failing(rbac_error("patch", "deployments.apps"), DEPLOYMENTS, f"example-decode-{revision}")
    shown = view(cluster, applied=failure)
    assert told(shown, "DecodeReady")[1] == "Forbidden"
    assert told(shown, "PrefillReady")[1] != "Forbidden"


def test_a_kind_that_may_not_be_watched_is_told_with_what_to_grant() -> None:
    cluster, _ = serving()
    shown = view(cluster, forbidden=(("watch", "deployments.apps"), ("list", "pods")))
    assert told(shown) == ("False", "Forbidden", "Failed")
    assert "may not watch deployments.apps" in conditions(shown)["ObjectsApplied"].message


def test_a_crd_of_another_release_is_told_beside_what_is_true_of_the_pods() -> None:
    cluster, _ = serving()
    shown = view(cluster, schema_outdated=True)
    assert told(shown, "SchemaCurrent") == ("False", "CRDOutdated", "Current")
    # A rollout that makes progress is not stalled by it.
    cluster, revision = starting()
    prefill_pod(cluster, revision, pod_status(running(), phase="Running"))
    assert told(view(cluster, schema_outdated=True)) == ("False", "LoadingModel", "InProgress")


def test_a_spec_that_is_not_acted_on_is_not_accepted_and_what_serves_stays_available() -> None:
    cluster, _ = serving()
    shown = view(
        cluster, goal=None, applied=None, refusal=("MultiNodeUnsupported", "spec.prefill.nodes is 2")
    )
    assert told(shown, "Accepted") == ("False", "MultiNodeUnsupported", "Failed")
    assert told(shown) == ("False", "MultiNodeUnsupported", "Failed")
    assert conditions(shown)["Available"].status == "True"
    assert "ObjectsApplied" not in conditions(shown)


def test_a_paused_service_tells_so_and_what_its_pods_do() -> None:
    cluster, _revision = serving()
    cluster.ask({"paused": True})
    shown = view(cluster, applied=None)
    assert told(shown, "ObjectsApplied")[:2] == ("Unknown", "Paused")
    assert told(shown)[:2] == ("Unknown", "Paused")
    assert {"Reconciling", "Stalled"}.isdisjoint(conditions(shown))
    assert conditions(shown)["Available"].status == "True"
    assert conditions(shown)["PrefillReady"].status == "True"


def test_a_change_that_waits_for_the_end_of_a_pause_is_told_as_such() -> None:
    cluster, old = serving()
    new = cluster.ask({**OTHER, "paused": True})
    shown = view(cluster, applied=None)
    assert told(shown)[:2] == ("Unknown", "Paused")
    assert "once spec.paused" in conditions(shown)["Accepted"].message
    assert told(shown, "RolloutComplete")[:2] == ("False", "Paused")
    assert {old, new} <= set(conditions(shown)["RolloutComplete"].message.split())
    assert told(shown, "PrefillReady")[:2] == ("True", "PodsReady")
    assert {"Reconciling", "Stalled"}.isdisjoint(conditions(shown))


def test_a_rollout_is_told_with_both_revisions_and_the_old_one_stays_available() -> None:
    cluster, old = serving()
    new = cluster.ask(OTHER)
    cluster.sick.add(new)
    cluster.settle()
    shown = view(cluster)
    assert told(shown, "RolloutComplete") == ("False", "RollingOut", "InProgress")
    assert {old, new} <= set(conditions(shown)["RolloutComplete"].message.split())
    assert conditions(shown)["Available"].status == "True"
    deployment = cluster.deployment("prefill", new)
    assert deployment is not None
    deployment["status"]["conditions"] = [
        {
            "type": "Progressing",
            "status": "False",
            "reason": "ProgressDeadlineExceeded",
            "message": f'ReplicaSet "example-prefill-{new}-x" has timed out progressing.',
        }
    ]
    shown = view(cluster)
    assert told(shown, "RolloutComplete") == ("False", "RolloutStuck", "Failed")
    assert f"revision {old} keeps serving" in conditions(shown)["RolloutComplete"].message
    assert conditions(shown)["Available"].status == "True"
    assert conditions(shown)["Stalled"].status == "True"


def test_a_new_revision_that_serves_no_token_does_not_make_a_service_available_that_never_served() -> None:
    cluster, _ = starting()
    new = cluster.ask(OTHER)
    cluster.mute.add(new)
    cluster.settle()
    assert cluster.serves(new)
    assert told(view(cluster), "Available")[:2] == ("False", "RoundTripPending")


def test_a_round_trip_that_fails_is_told_with_its_reason() -> None:
    cluster = SimulatedCluster(1)
    cluster.mute.add(cluster.ask())
    cluster.settle()
    generations = dict.fromkeys(cluster.pods, 1)
    assert told(view(cluster), "RolloutComplete") == ("False", "RoundTripPending", "InProgress")
    shown = view(cluster, reports=Reports(unproven="decode pod answered 500", generations=generations))
    assert told(shown) == ("False", "RoundTripFailed", "InProgress")
    assert "decode pod answered 500" in conditions(shown)["Ready"].message
    assert told(shown, "Available")[:2] == ("False", "RoundTripPending")


def test_a_role_without_pods_is_as_asked_and_nothing_is_served() -> None:
    cluster, _ = serving({"decode": {"replicas": 0}})
    assert told(view(cluster), "DecodeReady")[:2] == ("True", "ScaledToZero")
    shown = view(cluster)
    assert told(shown)[:2] == ("False", "ScaledToZero")
    assert {"Reconciling", "Stalled"}.isdisjoint(conditions(shown))
    assert told(shown, "Available")[:2] == ("False", "ScaledToZero")
    assert transitions(status_of(view(serving()[0])), status_of(shown)) == []


def test_without_a_ready_proxy_nothing_is_available() -> None:
    cluster, _ = serving()
    cluster.restart("proxy", cluster.goal().target.name)
    assert told(view(cluster), "Available")[:2] == ("False", "NoProxy")


def test_a_live_configuration_that_pods_do_not_follow_yet_is_told_with_their_names() -> None:
    cluster, _ = serving()
    ready = sorted(cluster.pods)
    shown = view(cluster, reports=Reports(generations=dict.fromkeys(ready[1:], 1)))
    assert told(shown, "ConfigApplied") == ("False", "Pending", "InProgress")
    assert ready[0] in conditions(shown)["ConfigApplied"].message
    assert told(shown) == ("False", "Pending", "InProgress")
    behind = dict.fromkeys(ready, 1) | {ready[0]: 0}
    assert told(view(cluster, reports=Reports(generations=behind)), "ConfigApplied")[0] == "False"


def test_a_live_configuration_that_no_worker_is_there_to_follow_is_not_in_use() -> None:
    cluster, _ = serving()
    revision = cluster.goal().target.name
    for role in ("prefill", "decode"):
        cluster.restart(role, revision)
    proxies = Reports(generations=dict.fromkeys(cluster.pods, 1))
    assert told(view(cluster, reports=proxies), "ConfigApplied")[:2] == ("False", "Pending")


def test_pods_that_stop_need_not_follow_the_live_configuration() -> None:
    cluster, _ = serving()
    name = sorted(cluster.pods)[0]
    cluster.pods[name]["metadata"]["deletionTimestamp"] = NOW
    others = {other: 1 for other in cluster.pods if other != name}
    assert told(view(cluster, reports=Reports(generations=others)), "ConfigApplied")[0] == "True"


@pytest.mark.parametrize(
    ("changes", "condition"),
    [
        (
            {
                "prefill": {
                    "autoscaling": {
                        "maxReplicas": 2,
                        "provider": "Keda",
                        "prometheusAddress": "http://p:9090",
                    }
                }
            },
            "AutoscalingReady",
        ),
        ({"proxy": {"httpRoute": {"parentRefs": [{"name": "public"}]}}}, "RouteReady"),
    ],
)
def test_an_object_whose_api_is_not_there_has_a_condition_and_one_that_is_there_has_none(
    changes: Spec, condition: str
) -> None:
    cluster, _ = serving(merged({}, changes))
    items = [item for step in cluster.goal().steps for item in step]
    absent = tuple(item for item in items if item["kind"] in ("ScaledObject", "HTTPRoute"))
    assert condition not in conditions(view(cluster))
    shown = view(cluster, applied=Applied(writes=0, failures=(), absent=absent))
    assert told(shown, condition)[:2] == ("False", "CRDNotInstalled")
    assert told(shown, "ObjectsApplied")[:2] == ("False", "CRDNotInstalled")
    assert told(shown) == ("False", "CRDNotInstalled", "Failed")
    assert told(shown, "Available")[0] == "True"


def test_ready_tells_what_needs_somebody_before_what_takes_its_time() -> None:
    """Objects come before pods, but an image that cannot be pulled is why nothing will happen."""
    cluster, revision = starting()
    prefill_pod(cluster, revision, pod_status(running(), phase="Running"))
    decode = cluster.members("decode", revision)[0]
    decode["status"] = pod_status(waiting("ImagePullBackOff", "denied"))
    shown = view(cluster)
    assert told(shown) == ("False", "ImagePullFailed", "Failed")
    assert conditions(shown)["Ready"].message.startswith("DecodeReady: ")
    assert conditions(shown)["Stalled"].reason == "ImagePullFailed"
    assert "Reconciling" not in conditions(shown)


def test_a_pod_that_is_ready_is_not_what_keeps_a_role_waiting() -> None:
    cluster, revision = starting({"prefill": {"replicas": 2}})
    first, second = cluster.members("prefill", revision)
    first["status"] = pod_status(running(ready=True), phase="Running", ready=True)
    second["status"] = {"phase": "Pending"}
    assert told(view(cluster), "PrefillReady")[1] == "PodsStarting"
