"""Kubernetes Events, one for each transition that somebody may look for."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from flowprefill_crd import FlowPrefillService, Status
from flowprefill_crd.v1alpha1 import Condition
from flowprefill_operator.cluster.client import Cluster
from flowprefill_operator.cluster.errors import ClusterError
from flowprefill_operator.kinds import EVENTS
from flowprefill_operator.resources.base import Object
from flowprefill_operator.status.verdict import ASKED_FOR

log = logging.getLogger(__name__)

CONTROLLER = "flowprefill.io/operator"
NOTE_LENGTH = 1000


def transitions(before: Status | None, after: Status) -> list[Condition]:
    """The conditions worth an Event: Ready and Available when they come to hold or cease to, Stalled when it appears."""
    old = {} if before is None else {c.type: c for c in before.conditions}
    found = []
    for condition in after.conditions:
        known = old.get(condition.type)
        match condition.type:
            case "Ready" | "Available":
                was = "False" if known is None else known.status
                changed = (was == "True") != (condition.status == "True")
            case "Stalled":
                changed = known is None or known.reason != condition.reason
            case _:
                changed = False
        if changed:
            found.append(condition)
    return found


def event(service: FlowPrefillService, condition: Condition, *, instance: str) -> Object:
    """The Event that tells of a condition's transition."""
    meta = service.metadata
    name = condition.type if condition.type in ("Ready", "Available") else condition.reason
    return {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.kind,
        "metadata": {"generateName": f"{meta.name[:50].rstrip('-.')}-", "namespace": meta.namespace},
        "eventTime": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "reportingController": CONTROLLER,
        "reportingInstance": instance,
        "action": "Reconcile",
        "reason": name if condition.status == "True" else f"Not{name}",
        "type": "Normal" if is_good(condition) else "Warning",
        "note": f"{condition.reason}: {condition.message}"[:NOTE_LENGTH],
        "regarding": {
            "apiVersion": service.api_version,
            "kind": service.kind,
            "name": meta.name,
            "namespace": meta.namespace,
            "uid": meta.uid,
        },
    }


def is_good(condition: Condition) -> bool:
    """Whether a transition is what somebody wants: it came to hold, or ceased to because the spec asks for it."""
    return condition.type != "Stalled" and (condition.status == "True" or condition.reason in ASKED_FOR)


async def tell(
    cluster: Cluster, service: FlowPrefillService, conditions: list[Condition], instance: str
) -> None:
    """Log transitions and write their Events. One that cannot be written is only logged: an Event is no state."""
    for condition in conditions:
        log.log(
            logging.INFO if is_good(condition) else logging.WARNING,
            "condition changed",
            extra={
                "service": f"{service.metadata.namespace}/{service.metadata.name}",
                "condition": f"{condition.type}={condition.status}",
                "reason": condition.reason,
                "text": condition.message,
            },
        )
        try:
            await cluster.create(event(service, condition, instance=instance))
        except ClusterError as error:
            log.warning("event not written", extra={"reason": str(error)})
