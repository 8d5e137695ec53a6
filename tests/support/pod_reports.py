"""What a supervisor reports of a pod."""

from __future__ import annotations

from typing import Any

from flowprefill_operator.node.state import PodReport


def pod_report(name: str, **changes: Any) -> PodReport:
    """A running, ready prefill pod without ports; `changes` are fields of `PodReport`."""
    fields: dict[str, Any] = {
        "name": name,
        "deployment": "d",
        "role": "prefill",
        "revision": "r1",
        "phase": "Running",
        "ready": True,
        "terminating": False,
        "restarts": 0,
        "started_at": 0.0,
        "message": "",
        "ports": {},
    }
    return PodReport(**{**fields, **changes})
