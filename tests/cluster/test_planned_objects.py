"""What is planned for every sample, on real API servers: accepted, and its pods admitted under restricted pod security."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from flowprefill_crd import load_services
from flowprefill_crd.samples import sample_path
from flowprefill_operator.plan import plan
from flowprefill_operator.settings import PlanSettings
from support.control_plane.plane import ControlPlane

SAMPLES = sorted(sample_path("quickstart.yaml").parent.glob("*.yaml"))
ADMISSION_S = 60.0
OF_OTHERS = {"ScaledObject"}
"""Kinds whose CRDs belong to other projects; this API server has none of them."""


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_a_samples_objects_are_accepted_and_its_pods_admitted(
    control_plane: ControlPlane, sample: Path
) -> None:
    namespace = f"sample-{sample.stem}"
    control_plane.kubectl("create", "namespace", namespace)
    restricted = "pod-security.kubernetes.io/enforce=restricted"
    control_plane.kubectl("label", "namespace", namespace, restricted)
    (service,) = load_services(sample)
    moved = service.model_copy(
        update={"metadata": service.metadata.model_copy(update={"namespace": namespace})}
    )
    objects = [planned for planned in plan(moved, PlanSettings()) if planned["kind"] not in OF_OTHERS]
    for planned in objects:
        control_plane.kubectl(
            *("apply", "--server-side", "--validate=strict", "-f", "-"), stdin=json.dumps(planned)
        )
    try:
        for planned in objects:
            if planned["kind"] == "Deployment":
                pods_admitted(control_plane, namespace, str(planned["metadata"]["name"]))
    finally:
        control_plane.kubectl("delete", "namespace", namespace, "--wait=false")


def pods_admitted(control_plane: ControlPlane, namespace: str, deployment: str) -> None:
    """Wait until all pods of a Deployment exist; a refusal stands in its conditions."""
    end_s = time.monotonic() + ADMISSION_S
    while True:
        found = control_plane.get("deployment", deployment, "-n", namespace)
        status: dict[str, Any] = found.get("status", {})
        refusals = [c["message"] for c in status.get("conditions", ()) if c["type"] == "ReplicaFailure"]
        assert not refusals, refusals
        if status.get("replicas") == found["spec"]["replicas"] > 0:
            return
        assert time.monotonic() < end_s, f"{deployment}: {status}"
        time.sleep(0.2)
