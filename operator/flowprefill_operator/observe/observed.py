"""Objects of the cluster as decisions see them: small, whatever their real size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowprefill_operator import labels
from flowprefill_operator.cluster.client import MANAGER
from flowprefill_operator.kinds import DEPLOYMENTS, JOBS, PODS, RECORDS, Kind
from flowprefill_operator.observe.managed_fields import applied_fields

APPLIED = "flowprefill.io/applied"
"""Annotation of an owned object: hash of what the operator applied, without the annotation itself."""

Key = tuple[Kind, str]
"""Kind and name of an object within a namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """State of a Deployment. `generation_seen` is the one that its controller has worked on."""

    replicas: int
    current: int
    updated: int
    ready: int
    generation_seen: int
    conditions: Mapping[str, tuple[str, str, str]]
    """Type to (status, reason, message)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """State of one container of a pod. `waiting`, `ended` and `ended_before` are (reason, message) or None;
    `exit_code` is of the end that is told, the present one or the one before."""

    name: str
    init: bool
    ready: bool
    running: bool
    restarts: int
    waiting: tuple[str, str] | None
    ended: tuple[str, str] | None
    ended_before: tuple[str, str] | None
    exit_code: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """State of a pod. `admin_port` is the number of its port of that name; `unschedulable` is the scheduler's message, `failed` why
    the pod as a whole has ended, such as an eviction; `since` the time it was created."""

    role: str
    revision: str
    ip: str | None
    admin_port: int | None
    phase: str
    ready: bool
    terminating: bool
    since: str
    unschedulable: str | None
    failed: str | None
    containers: tuple[Container, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """State of a profiling Job."""

    succeeded: bool
    failed: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A ControllerRevision: what was rendered for a revision."""

    number: int
    data: str
    """JSON text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaler:
    """State of an autoscaler. `idle` is (reason, message) of why it does not scale; None while it does, or has not said."""

    idle: tuple[str, str] | None


Detail = Workload | Pod | Job | Record | Scaler | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One object. `controller` is the uid of its controlling owner; `fields` are the fields that the operator owns,
    FieldsV1 as JSON text, or None; `data` is a ConfigMap's."""

    kind: Kind
    namespace: str
    name: str
    uid: str
    resource_version: str
    generation: int
    labels: Mapping[str, str]
    controller: str | None
    applied: str | None
    fields: str | None
    terminating: bool
    created: str
    detail: Detail = None
    data: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        return (self.kind, self.name)


def observe(kind: Kind, item: Mapping[str, Any]) -> Observed:
    """The object, cut down."""
    meta = item["metadata"]
    annotations = meta.get("annotations") or {}
    owned = applied_fields({"apiVersion": kind.api_version, **item}, MANAGER)
    return Observed(
        kind=kind,
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        resource_version=meta["resourceVersion"],
        generation=meta.get("generation", 0),
        labels=meta.get("labels") or {},
        controller=_controller(meta),
        applied=annotations.get(APPLIED),
        fields=None if owned is None else json.dumps(owned, separators=(",", ":")),
        terminating="deletionTimestamp" in meta,
        created=meta.get("creationTimestamp") or "",
        detail=_detail(kind, item),
        data=(item.get("data") or {}) if kind.kind == "ConfigMap" else {},
    )


def _controller(meta: Mapping[str, Any]) -> str | None:
    for owner in meta.get("ownerReferences") or ():
        if owner.get("controller"):
            return str(owner["uid"])
    return None


def _detail(kind: Kind, item: Mapping[str, Any]) -> Detail:
    if kind == DEPLOYMENTS:
        return _workload(item)
    if kind == PODS:
        return _pod(item)
    if kind == JOBS:
        return _job(item)
    if kind.kind in SCALING:
        return _scaler(item, SCALING[kind.kind])
    if kind == RECORDS:
        return Record(
            number=item.get("revision", 0), data=json.dumps(item.get("data"), separators=(",", ":"))
        )
    return None


def _workload(item: Mapping[str, Any]) -> Workload:
    status = item.get("status") or {}
    return Workload(
        replicas=item["spec"].get("replicas", 1),
        current=status.get("replicas", 0),
        updated=status.get("updatedReplicas", 0),
        ready=status.get("readyReplicas", 0),
        generation_seen=status.get("observedGeneration", 0),
        conditions=_conditions(status),
    )


def _job(item: Mapping[str, Any]) -> Job:
    conditions = _conditions(item.get("status") or {})
    failed = conditions.get("Failed")
    return Job(
        succeeded=conditions.get("Complete", ("", "", ""))[0] == "True",
        failed=f"{failed[1]}: {failed[2]}" if failed is not None and failed[0] == "True" else None,
    )


SCALING = {"HorizontalPodAutoscaler": ("AbleToScale", "ScalingActive"), "ScaledObject": ("Ready",)}
"""Conditions of an autoscaler without which it does nothing."""


def _scaler(item: Mapping[str, Any], needed: Sequence[str]) -> Scaler:
    conditions = _conditions(item.get("status") or {})
    idle = [conditions[name] for name in needed if name in conditions and conditions[name][0] == "False"]
    return Scaler(idle=(idle[0][1] or "NotReady", idle[0][2]) if idle else None)


def _conditions(status: Mapping[str, Any]) -> dict[str, tuple[str, str, str]]:
    return {
        c["type"]: (c["status"], c.get("reason", ""), c.get("message", ""))
        for c in status.get("conditions") or ()
    }


def _pod(item: Mapping[str, Any]) -> Pod:
    meta, status = item["metadata"], item.get("status") or {}
    its_labels = meta.get("labels") or {}
    conditions = _conditions(status)
    scheduled = conditions.get("PodScheduled")
    return Pod(
        role=its_labels.get(labels.ROLE, ""),
        revision=its_labels.get(labels.REVISION, ""),
        ip=status.get("podIP"),
        admin_port=_port(item.get("spec") or {}, labels.ADMIN_PORT),
        phase=status.get("phase", "Pending"),
        ready=conditions.get("Ready", ("", "", ""))[0] == "True",
        terminating="deletionTimestamp" in meta,
        since=meta.get("creationTimestamp") or "",
        failed=_failure(status),
        unschedulable=scheduled[2] if scheduled is not None and scheduled[0] == "False" else None,
        containers=(
            *_containers(status.get("initContainerStatuses") or (), init=True),
            *_containers(status.get("containerStatuses") or (), init=False),
        ),
    )


def _failure(status: Mapping[str, Any]) -> str | None:
    parts = [str(status[key]) for key in ("reason", "message") if status.get(key)]
    return ": ".join(parts) or None


def _port(spec: Mapping[str, Any], name: str) -> int | None:
    ports = (port for container in spec.get("containers") or () for port in container.get("ports") or ())
    return next((port["containerPort"] for port in ports if port.get("name") == name), None)


def _containers(statuses: Sequence[Mapping[str, Any]], *, init: bool) -> list[Container]:
    return [_container(entry, init=init) for entry in statuses]


def _container(entry: Mapping[str, Any], *, init: bool) -> Container:
    state, last = entry.get("state") or {}, entry.get("lastState") or {}
    ended, before = state.get("terminated"), last.get("terminated")
    told = ended or before
    return Container(
        name=entry["name"],
        init=init,
        ready=bool(entry.get("ready")),
        running="running" in state,
        restarts=entry.get("restartCount", 0),
        waiting=_reason(state.get("waiting")),
        ended=_reason(ended),
        ended_before=_reason(before),
        exit_code=None if told is None else told.get("exitCode"),
    )


def _reason(part: Mapping[str, Any] | None) -> tuple[str, str] | None:
    return None if part is None else (part.get("reason", ""), part.get("message", ""))
