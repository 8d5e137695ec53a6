"""What is planned, on real API servers: accepted, and its pods admitted under restricted pod security."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowprefill_crd import FlowPrefillService, load_services, parse_service
from flowprefill_crd.samples import sample_path
from flowprefill_operator.plan import plan
from flowprefill_operator.resources.base import Context, Object
from flowprefill_operator.resources.profiling import profile_config_map
from flowprefill_operator.settings import PlanSettings
from support.control_plane.plane import ControlPlane
from support.ecosystem import ecosystem_crds
from support.services import MINIMAL_SPEC, document, merged

SAMPLES = sorted(sample_path("quickstart.yaml").parent.glob("*.yaml"))
ADMISSION_S = 60.0
TRIES = 5
OF_OTHERS = {"ScaledObject", "PodMonitor", "HTTPRoute"}
"""Kinds whose CRDs belong to other projects."""

FULL: dict[str, Any] = {
    "scheduling": {"predictor": {"profilingJob": True}},
    "observability": {"monitorLabels": {"release": "prometheus"}},
    "prefill": {
        "autoscaling": {
            "maxReplicas": 3,
            "provider": "Keda",
            "prometheusAddress": "http://p.monitoring:9090",
        },
        "resources": {"requests": {"cpu": "100m"}},
    },
    "decode": {"autoscaling": {"minReplicas": 2, "maxReplicas": 3}, "resources": {"requests": {"cpu": "1"}}},
    "proxy": {
        "replicas": 2,
        "httpRoute": {
            "parentRefs": [
                {"name": "public", "namespace": "gateways", "sectionName": "https", "port": 443},
                {"name": "public", "namespace": "gateways", "sectionName": "http"},
                {"name": "inner"},
            ],
            "hostnames": ["llm.example.com", "*.llm.example.com"],
        },
    },
}
"""A service that asks for every kind of object that there is."""


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_a_samples_objects_are_accepted_and_its_pods_admitted(
    control_plane: ControlPlane, sample: Path
) -> None:
    (service,) = load_services(sample)
    with namespace_of(control_plane, f"sample-{sample.stem}", service) as moved:
        objects = [planned for planned in plan(moved, PlanSettings()) if planned["kind"] not in OF_OTHERS]
        apply(control_plane, *objects)
        for planned in objects:
            if planned["kind"] == "Deployment":
                pods_admitted(control_plane, moved.metadata.namespace, name_of(planned))


@pytest.fixture
def ecosystem(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """The control plane with the CRDs of other projects, for as long as a test takes."""
    files = [option for file in ecosystem_crds() for option in ("-f", str(file))]
    control_plane.kubectl("apply", "--server-side", *files)
    control_plane.until_done("wait", "--for=condition=Established", "--timeout=60s", *files)
    yield control_plane
    control_plane.kubectl("delete", *files)


def test_every_kind_of_object_is_accepted_and_applying_it_again_writes_nothing(
    ecosystem: ControlPlane,
) -> None:
    service = parse_service(document(merged(MINIMAL_SPEC, FULL)))
    with namespace_of(ecosystem, "every-kind", service) as moved:
        objects = plan(moved, PlanSettings(monitoring_from=(), operator_namespace="flowprefill"))
        assert {str(planned["kind"]) for planned in objects} >= OF_OTHERS
        eventually_applied(ecosystem, objects)
        for planned in objects:
            assert leaves_it_alone(ecosystem, planned), f"{planned['kind']} {name_of(planned)}"


def test_the_profiling_job_gets_its_pod_under_restricted_pod_security(control_plane: ControlPlane) -> None:
    spec = merged(MINIMAL_SPEC, {"scheduling": {"predictor": {"profilingJob": True}}})
    service = parse_service(document(merged(spec, {"model": {"uri": "hf://org/name"}})))
    with namespace_of(control_plane, "profiling", service) as moved:
        context = Context(moved, PlanSettings())
        objects = plan(moved, context.settings)
        (job,) = [planned for planned in objects if planned["kind"] == "Job"]
        needed = [planned for planned in objects if planned["kind"] in ("ConfigMap", "Job")]
        apply(control_plane, *needed, profile_config_map(context, '{"points": []}'))
        name, namespace = name_of(job), moved.metadata.namespace
        end_s = time.monotonic() + ADMISSION_S
        pods: list[dict[str, Any]] = []
        while not pods:
            assert time.monotonic() < end_s, control_plane.get("job", name, "-n", namespace)
            pods = control_plane.get("pods", "-l", f"job-name={name}", "-n", namespace)["items"]
            time.sleep(0.2)
        (pod,) = pods
        assert pod["metadata"]["labels"]["flowprefill.io/role"] == "profiler"
        assert pod["spec"]["restartPolicy"] == "Never"


@contextmanager
def namespace_of(
    plane: ControlPlane, namespace: str, service: FlowPrefillService
) -> Iterator[FlowPrefillService]:
    """The service in a namespace of its own that admits restricted pods only."""
    plane.kubectl("create", "namespace", namespace)
    plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    metadata = service.metadata.model_copy(update={"namespace": namespace})
    try:
        yield service.model_copy(update={"metadata": metadata})
    finally:
        plane.kubectl("delete", "namespace", namespace, "--wait=false")


def apply(plane: ControlPlane, *objects: Object, check: bool = True) -> str:
    """Apply on the server, refusing unknown fields; what was said against it."""
    body = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    done = plane.kubectl(*("apply", "--server-side", "--validate=strict", "-f", "-"), stdin=body, check=check)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def eventually_applied(plane: ControlPlane, objects: Sequence[Object]) -> None:
    """Apply, waiting while the server does not know a kind yet: a CRD is established before its path answers."""
    end_s = time.monotonic() + ADMISSION_S
    while said := apply(plane, *objects, check=False):
        assert "no matches for kind" in said or "could not find the requested resource" in said, said
        assert time.monotonic() < end_s, said
        time.sleep(0.2)


def leaves_it_alone(plane: ControlPlane, planned: Object) -> bool:
    """Whether applying an object again leaves its version as it is, at least once between writes of controllers."""
    for _ in range(TRIES):
        before = version(plane, planned)
        apply(plane, planned)
        if version(plane, planned) == before:
            return True
    return False


def name_of(planned: Object) -> str:
    return str(metadata_of(planned)["name"])


def metadata_of(planned: Object) -> dict[str, Any]:
    metadata = planned["metadata"]
    assert isinstance(metadata, dict)
    return metadata


def version(plane: ControlPlane, planned: Object) -> str:
    kind, namespace = str(planned["kind"]).lower(), str(metadata_of(planned)["namespace"])
    return str(plane.get(kind, name_of(planned), "-n", namespace)["metadata"]["resourceVersion"])


def pods_admitted(plane: ControlPlane, namespace: str, deployment: str) -> None:
    """Wait until all pods of a Deployment exist; a refusal stands in its conditions."""
    end_s = time.monotonic() + ADMISSION_S
    while True:
        found = plane.get("deployment", deployment, "-n", namespace)
        status: dict[str, Any] = found.get("status", {})
        refusals = [c["message"] for c in status.get("conditions", ()) if c["type"] == "ReplicaFailure"]
        assert not refusals, refusals
        if status.get("replicas") == found["spec"]["replicas"] > 0:
            return
        assert time.monotonic() < end_s, f"{deployment}: {status}"
        time.sleep(0.2)
