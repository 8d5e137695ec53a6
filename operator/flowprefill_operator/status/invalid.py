"""The status of a service that cannot be read: what an older CRD let in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MESSAGE_LENGTH = 1024


def invalid_status(body: Mapping[str, Any], problem: str, *, now: str) -> dict[str, Any]:
    """What is known stays, and Accepted, Ready and Stalled tell the problem."""
    before = body.get("status") or {}
    generation = body["metadata"].get("generation", 0)
    old = {c["type"]: c for c in before.get("conditions", ())}

    def condition(name: str, status: str) -> dict[str, Any]:
        known = old.get(name, {})
        since = known.get("lastTransitionTime", now) if known.get("status") == status else now
        return {
            "type": name,
            "status": status,
            "reason": "InvalidSpec",
            "message": problem[:MESSAGE_LENGTH],
            "observedGeneration": generation,
            "lastTransitionTime": since,
        }

    told = {"Ready": "False", "Accepted": "False", "Stalled": "True"}
    kept = [c for c in before.get("conditions", ()) if c["type"] not in told and c["type"] != "Reconciling"]
    return {
        **before,
        "observedGeneration": generation,
        "conditions": [*(condition(name, status) for name, status in told.items()), *kept],
    }
