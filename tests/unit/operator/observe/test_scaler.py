"""An autoscaler that does nothing says why."""

from __future__ import annotations

from typing import Any

import pytest

from flowprefill_operator.kinds import OWNED, Kind
from flowprefill_operator.observe.observed import Scaler, observe


def kind(name: str) -> Kind:
    return next(found for found in OWNED if found.kind == name)


def autoscaler(name: str, **conditions: str) -> dict[str, Any]:
    told = [
        {"type": key, "status": status, "reason": f"{key}Reason", "message": f"{key} is {status}"}
        for key, status in conditions.items()
    ]
    meta = {"name": "web-prefill", "namespace": "ns", "uid": "u", "resourceVersion": "1"}
    return {"kind": name, "metadata": meta, "status": {"conditions": told}}


@pytest.mark.parametrize(
    ("item", "idle"),
    [
        (autoscaler("HorizontalPodAutoscaler"), None),
        (autoscaler("HorizontalPodAutoscaler", AbleToScale="True", ScalingActive="True"), None),
        # At the most or the least pods it does what it should.
        (autoscaler("HorizontalPodAutoscaler", ScalingActive="True", ScalingLimited="True"), None),
        (
            autoscaler("HorizontalPodAutoscaler", AbleToScale="True", ScalingActive="False"),
            ("ScalingActiveReason", "ScalingActive is False"),
        ),
        (autoscaler("ScaledObject", Ready="True", Active="False"), None),
        (autoscaler("ScaledObject", Ready="False"), ("ReadyReason", "Ready is False")),
    ],
    ids=["silent", "active", "limited", "without-metrics", "keda-without-load", "keda-not-ready"],
)
def test_what_keeps_it_from_scaling_is_seen(item: dict[str, Any], idle: tuple[str, str] | None) -> None:
    assert observe(kind(item["kind"]), item).detail == Scaler(idle=idle)
