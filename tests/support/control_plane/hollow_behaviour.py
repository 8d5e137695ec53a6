"""What becomes of a pod on a hollow node, and the status that a kubelet would report for it.

Reasons, messages and shapes are those of a real kubelet (Kubernetes 1.34 and 1.37).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Running and ready after `delay_s` in ContainerCreating. `init_message` is what init containers left in their
    termination log."""

    delay_s: float = 0.0
    init_message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverReady:
    """Running, but the readiness probe fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePullFails:
    """The image cannot be pulled."""

    reason: str = "ImagePullBackOff"
    message: str = 'Back-off pulling image "nowhere.example/serving:1": ErrImagePull: not found'


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFails:
    """A container cannot be made, as when a Secret is missing."""

    message: str = 'secret "hub-token" not found'


@dataclass(frozen=True, slots=True, kw_only=True)
class MountFails:
    """A volume cannot be mounted: the pod stays in ContainerCreating, and an Event alone says why."""

    message: str = 'MountVolume.SetUp failed for volume "api-keys" : secret "keys" not found'


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashLoops:
    """The container ends again and again with `exit_code` and writes `message` to its termination log."""

    exit_code: int = 1
    message: str = ""
    restarts: int = 3
    reason: str = "Error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Initializes:
    """The first init container runs and does not end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completes:
    """The pod ends: `exit_code` 0 is success. `message` is what it left in its termination log."""

    exit_code: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """The node threw the pod out."""

    message: str = "The node was low on resource: memory."


Behaviour = (
    Runs
    | NeverReady
    | ImagePullFails
    | ConfigFails
    | MountFails
    | CrashLoops
    | Initializes
    | Completes
    | Evicted
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a pod runs and since when (RFC 3339)."""

    pod_ip: str
    host_ip: str
    started: str


def now_text() -> str:
    """The present time as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def status_of(pod: Json, behaviour: Behaviour, place: Place, now: str) -> Json:
    """The status of `pod` under `behaviour`, as a strategic merge patch of its status.

    A condition keeps its lastTransitionTime unless it turns.
    """
    spec = pod["spec"]
    inits: list[Json] = spec.get("initContainers", [])
    match behaviour:
        case Runs(init_message=message):
            past = _terminated(0, "Completed", message, now)
            return _status(pod, place, now, "Running", _running(now), ready=True, past=past)
        case NeverReady():
            return _status(pod, place, now, "Running", _running(now))
        case ImagePullFails(reason=reason, message=message):
            waiting = {"waiting": {"reason": reason, "message": message}}
            return _status(pod, place, now, "Pending", waiting, blocked_init=bool(inits))
        case ConfigFails(message=message):
            waiting = {"waiting": {"reason": "CreateContainerConfigError", "message": message}}
            return _status(pod, place, now, "Pending", waiting, blocked_init=bool(inits))
        case MountFails():
            return creating(pod, place, now)
        case CrashLoops():
            ended = _terminated(behaviour.exit_code, behaviour.reason, behaviour.message, now)
            name, uid = spec["containers"][0]["name"], pod["metadata"]["uid"]
            meta = pod["metadata"]
            said = (
                f"back-off 40s restarting failed container={name} "
                f"pod={meta['name']}_{meta['namespace']}({uid})"
            )
            waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": said}}
            return _status(pod, place, now, "Running", waiting, last=ended, restarts=behaviour.restarts)
        case Initializes():
            assert inits, f"{pod['metadata']['name']} has no init container to wait for"
            return _status(pod, place, now, "Pending", _initializing(), init=_running(now), blocked_init=True)
        case Completes(exit_code=code, message=message):
            ended = _terminated(code, "Completed" if code == 0 else "Error", message, now)
            phase = "Succeeded" if code == 0 else "Failed"
            return _status(pod, place, now, phase, ended, reason="PodCompleted" if code == 0 else "PodFailed")
        case Evicted(message=message):
            ended = _terminated(137, "Error", "", now)
            status = _status(pod, place, now, "Failed", ended, reason="PodFailed")
            return status | {"reason": "Evicted", "message": message, "containerStatuses": []}


def mount_event(pod: Json, message: str, now: str) -> Json:
    """The Event of a kubelet that cannot mount a volume of the pod."""
    meta = pod["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{meta['name']}.", "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
        },
        "type": "Warning",
        "reason": "FailedMount",
        "message": message,
        "source": {"component": "kubelet"},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def creating(pod: Json, place: Place, now: str) -> Json:
    """The status between being scheduled and the first container: no address yet."""
    waiting = {"waiting": {"reason": "ContainerCreating"}}
    inits = bool(pod["spec"].get("initContainers"))
    status = _status(pod, place, now, "Pending", waiting, blocked_init=inits, init=_initializing())
    return {key: value for key, value in status.items() if key not in {"podIP", "podIPs"}}


def _running(now: str) -> Json:
    return {"running": {"startedAt": now}}


def _initializing() -> Json:
    return {"waiting": {"reason": "PodInitializing"}}


def _terminated(code: int, reason: str, message: str, now: str) -> Json:
    ended: Json = {"exitCode": code, "reason": reason, "startedAt": now, "finishedAt": now}
    if message:
        ended["message"] = message
    return {"terminated": ended}


def _status(
    pod: Json,
    place: Place,
    now: str,
    phase: str,
    state: Json,
    *,
    ready: bool = False,
    blocked_init: bool = False,
    init: Json | None = None,
    past: Json | None = None,
    last: Json | None = None,
    restarts: int = 0,
    reason: str | None = None,
) -> Json:
    """`blocked_init` says that the first init container is not past; `init` is its state (`state` by default). `past` is the
    state of those that are."""
    spec = pod["spec"]
    unready = None if ready else (reason or "ContainersNotReady")
    initialized = None if not blocked_init else "ContainersNotInitialized"
    conditions = [
        _condition(pod, "PodReadyToStartContainers", phase not in {"Succeeded", "Failed"}, now, None),
        _condition(pod, "Initialized", not blocked_init, now, initialized),
        _condition(pod, "ContainersReady", ready, now, unready),
        _condition(pod, "Ready", ready, now, unready),
    ]
    status: Json = {
        "phase": phase,
        "hostIP": place.host_ip,
        "hostIPs": [{"ip": place.host_ip}],
        "podIP": place.pod_ip,
        "podIPs": [{"ip": place.pod_ip}],
        "startTime": place.started,
        "conditions": conditions,
        "containerStatuses": [
            _container(
                container,
                _initializing() if blocked_init else state,
                ready=ready,
                restarts=max(restarts, _restarts(pod, container["name"])),
                last=last,
            )
            for container in spec["containers"]
        ],
    }
    inits: list[Json] = spec.get("initContainers", [])
    if inits:
        done = past or _terminated(0, "Completed", "", now)
        states = [(init or state) if blocked_init and i == 0 else done for i in range(len(inits))]
        if blocked_init:
            states[1:] = [_initializing()] * (len(inits) - 1)
        status["initContainerStatuses"] = [
            _container(container, shown, ready="terminated" in shown)
            for container, shown in zip(inits, states, strict=True)
        ]
    return status


def _condition(pod: Json, kind: str, holds: bool, now: str, reason: str | None) -> Json:
    before: Mapping[str, Any] = next(
        (c for c in pod.get("status", {}).get("conditions", ()) if c["type"] == kind), {}
    )
    value = "True" if holds else "False"
    changed = before.get("lastTransitionTime") if before.get("status") == value else None
    # null removes the reason that the condition had while it was false.
    return {"type": kind, "status": value, "lastTransitionTime": changed or now, "reason": reason}


def _restarts(pod: Json, container: str) -> int:
    """How often the container has been restarted already; the number never falls."""
    known = pod.get("status", {}).get("containerStatuses", ())
    return next((int(c["restartCount"]) for c in known if c["name"] == container), 0)


def _container(
    container: Json, state: Json, *, ready: bool, restarts: int = 0, last: Json | None = None
) -> Json:
    image = container["image"]
    return {
        "name": container["name"],
        "image": image,
        "imageID": f"{image}@sha256:{'0' * 64}" if "waiting" not in state else "",
        "containerID": "" if "waiting" in state else f"containerd://{container['name']}-{restarts}",
        "state": state,
        "lastState": last or {},
        "ready": ready,
        "started": "running" in state,
        "restartCount": restarts,
    }
