"""How a role's pods are, and what keeps them from being ready. The worst of what is wrong is told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from flowprefill_operator.kinds import DEPLOYMENTS
from flowprefill_operator.observe.observed import Container, Observed, Pod, Workload
from flowprefill_operator.pinning import commits, strays
from flowprefill_operator.scene import PROXY
from flowprefill_operator.status.failures import of_failure, refusal_reason
from flowprefill_operator.status.verdict import Verdict, holds, pending, stalled
from flowprefill_operator.status.view import View

IMAGE_REASONS = frozenset(
    {"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
)
CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
LOADING = frozenset({"LoadingModel", "FetchingModel"})
_WORST_FIRST = (
    "ImagePullFailed",
    "SecretMissing",
    "ContainerConfigError",
    "CrashLoop",
    "ModelRevisionsDiffer",
    "VolumeNotMounted",
    "Unschedulable",
    "PodFailed",
    "FetchingModel",
    "LoadingModel",
    "NotReady",
    "PodsStarting",
)


def role_verdict(view: View, role: str, revision: str) -> Verdict:
    """Whether a role of a revision has all the pods it should have, ready."""
    deployment = view.scene.deployments.get((role, revision))
    workload = view.scene.workload(role, revision)
    for failure in view.applied.failures if view.applied is not None else ():
        planned = {} if view.goal is None else view.goal.deployments
        if failure.kind == DEPLOYMENTS and planned.get(failure.name) == role:
            return of_failure(failure)
    if workload is None or deployment is None:
        waits_for = None if view.goal is None else view.goal.waits_for
        blocked = view.applied is not None and view.applied.failures
        text = f"revision {revision} has no Deployment yet"
        if blocked:
            text += "; it is made once the objects before it could be applied"
        return pending("PodsStarting", f"waits for {waits_for}" if waits_for else text)
    if workload.replicas == 0:
        return holds("ScaledToZero", "no pods are asked for")
    counted = f"{min(workload.ready, workload.replicas)} of {workload.replicas} pods are ready"
    astray = list(strayed(view, role, revision))
    if view.scene.complete(role, revision) and not astray:
        return holds("PodsReady", counted)
    refused = workload.conditions.get("ReplicaFailure")
    if refused is not None and refused[0] == "True":
        return stalled(refusal_reason(refused[2]), f"{counted}; {refused[2]}")
    found = worst([*astray, *problems(members(view, role, revision), view.reports.mounts)])
    if found is None:
        return pending("PodsStarting", f"{counted}{_unsettled(deployment, workload)}")
    return replace(found, message=f"{counted}; {found.message}")


def _unsettled(deployment: Observed, workload: Workload) -> str:
    """What of a Deployment is on its way although none of its pods has a problem."""
    stale, surplus = workload.replicas - workload.updated, workload.current - workload.replicas
    if workload.generation_seen < deployment.generation:
        return ", and the last change has not reached them yet"
    if workload.ready < workload.replicas:
        return ""
    if stale > 0:
        return f", and {stale} {_is(stale)} still to be replaced"
    return f", and {surplus} more {_is(surplus)} still to go" if surplus > 0 else ""


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def members(view: View, role: str, revision: str) -> list[tuple[Observed, Pod]]:
    """The pods of a role and revision that are to stay."""
    return [
        (item, pod)
        for item, pod in view.scene.pods
        if (pod.role, pod.revision) == (role, revision) and not pod.terminating
    ]


def problems(pods: Iterable[tuple[Observed, Pod]], mounts: Mapping[str, str]) -> Iterator[Verdict]:
    """What keeps each pod from being ready, one verdict a pod."""
    for item, pod in pods:
        if not pod.ready:
            yield pod_verdict(item.name, pod, mounts.get(item.name))


def strayed(view: View, role: str, revision: str) -> Iterator[Verdict]:
    """One verdict for each pod whose model is of another commit than its revision's: it asked before that was settled."""
    found = strays(view.scene, revision)
    for item, _ in members(view, role, revision):
        if item.name in found:
            yield stalled(
                "ModelRevisionsDiffer",
                f"pod {item.name} has commit {found[item.name]} of the model, and revision {revision} is pinned to "
                f"{commits(view.scene)[revision]}; delete the pod, the one in its place gets that commit",
            )


def worst(found: Iterable[Verdict]) -> Verdict | None:
    """The most serious of several problems."""
    return min(found, key=lambda verdict: _WORST_FIRST.index(verdict.reason), default=None)


def pod_verdict(name: str, pod: Pod, unmounted: str | None = None) -> Verdict:
    """What keeps a pod from being ready."""
    if pod.unschedulable is not None:
        return pending("Unschedulable", f"pod {name} has no node: {pod.unschedulable}")
    for container in pod.containers:
        found = _container_verdict(name, container)
        if found is not None:
            return found
    if unmounted is not None:
        reason = "SecretMissing" if "secret" in unmounted.lower() else "VolumeNotMounted"
        return (stalled if reason == "SecretMissing" else pending)(reason, f"pod {name}: {unmounted}")
    if pod.phase == "Failed":
        return pending(
            "PodFailed", f"pod {name} has failed and is replaced ({pod.failed or 'no reason given'})"
        )
    if any(container.init and container.running for container in pod.containers):
        return pending("FetchingModel", f"pod {name} fetches the model")
    if any(not container.init and container.running for container in pod.containers):
        text = f"pod {name} runs and is not ready yet"
        return pending("NotReady", text) if pod.role == PROXY else pending("LoadingModel", text)
    return pending("PodsStarting", f"pod {name} is being started")


def _container_verdict(name: str, container: Container) -> Verdict | None:
    reason, message = container.waiting or ("", "")
    where = f"pod {name}, container {container.name}"
    if reason in IMAGE_REASONS:
        return stalled("ImagePullFailed", f"{where}: {reason}: {message}")
    if reason in CONFIG_REASONS:
        missing = "secret" in message.lower() and "not found" in message
        return stalled(
            "SecretMissing" if missing else "ContainerConfigError", f"{where}: {message or reason}"
        )
    if reason == "CrashLoopBackOff" or (container.restarts > 0 and not container.running):
        return stalled(
            "CrashLoop", f"{where} has ended {container.restarts} times, last with {_end(container)}"
        )
    return None


def _end(container: Container) -> str:
    """How the container ended last, in words."""
    ended = container.ended or container.ended_before
    code = "an unknown status" if container.exit_code is None else f"status {container.exit_code}"
    if ended is None:
        return code
    text = " ".join(part for part in (ended[0], ended[1].strip()) if part)
    return f"{code} ({text})" if text else code
