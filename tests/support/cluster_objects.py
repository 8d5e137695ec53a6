"""Parts of objects as an API server answers them: states of containers, pods and Deployments, errors, managed fields."""

from __future__ import annotations

import json
from typing import Any

from flowprefill_operator.cluster.errors import ClusterError, answer_error
from flowprefill_operator.kinds import Kind

Raw = dict[str, Any]

CREATED = "2026-01-01T00:00:00Z"


def waiting(reason: str, message: str = "", **more: Any) -> Raw:
    """Status of a container that waits."""
    return _container({"waiting": {"reason": reason, "message": message}}, **more)


def running(*, ready: bool = False, **more: Any) -> Raw:
    return _container({"running": {"startedAt": CREATED}}, ready=ready, **more)


def ended(code: int, reason: str = "Error", message: str = "", **more: Any) -> Raw:
    return _container(terminated(code, reason, message), **more)


def terminated(code: int, reason: str = "Error", message: str = "") -> Raw:
    """A container's state or last state."""
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


def _container(
    state: Raw, *, name: str = "main", ready: bool = False, restarts: int = 0, last: Raw | None = None
) -> Raw:
    return {
        "name": name,
        "ready": ready,
        "restartCount": restarts,
        "state": state,
        "lastState": last or {},
    }


def pod_status(
    *containers: Raw, init: tuple[Raw, ...] = (), phase: str = "Pending", ready: bool = False
) -> Raw:
    """Status of a pod that has a node."""
    return {
        "phase": phase,
        "podIP": "10.0.0.9",
        "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "True" if ready else "False"},
        ],
        "initContainerStatuses": list(init),
        "containerStatuses": list(containers),
    }


def unschedulable(message: str) -> Raw:
    """Status of a pod that the scheduler finds no node for."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [condition]}


def owned_object(
    kind: Kind,
    name: str,
    *,
    version: int = 1,
    uid: str | None = None,
    labels: dict[str, str] | None = None,
    **more: Any,
) -> Raw:
    """An object of a service called `example` in the namespace `ns`."""
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": uid or f"uid-{name}",
            "resourceVersion": str(version),
            "creationTimestamp": CREATED,
            "labels": {"flowprefill.io/service": "example"} if labels is None else labels,
        },
        **more,
    }


def status_body(status: int, reason: str, message: str) -> bytes:
    """A Status object, as API servers answer what they refuse."""
    return json.dumps(
        {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": status,
        }
    ).encode()


def refused(
    status: int, reason: str, message: str, *, verb: str = "patch", resource: str = "deployments.apps"
) -> ClusterError:
    """The error that such an answer becomes."""
    return answer_error(verb, resource, status, status_body(status, reason, message))


def quota_error(name: str) -> ClusterError:
    return refused(
        403,
        "Forbidden",
        f'pods "{name}" is forbidden: exceeded quota: small, requested: pods=1, used: pods=3, limited: pods=3',
        verb="create",
        resource="pods",
    )


def rbac_error(verb: str, resource: str) -> ClusterError:
    plural, _, group = resource.partition(".")
    return refused(
        403,
        "Forbidden",
        f'{resource} "example" is forbidden: User "system:serviceaccount:flowprefill-system:flowprefill-operator" cannot '
        f'{verb} resource "{plural}" in API group "{group}" in the namespace "ns"',
        verb=verb,
        resource=resource,
    )
