"""What the chart renders, for many values, is accepted field by field by real API servers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from support.control_plane.plane import ControlPlane
from support.ecosystem import ecosystem_crds
from support.helm import Helm, default_values, helm_program, values_schema
from support.helm_values import CASES, NAMESPACES, Case, toggles

NAMESPACE = "chart-objects"


def accept(plane: ControlPlane, folder: Path, cases: Iterable[Case]) -> None:
    """All objects of the cases in one strict dry run, equal ones once."""
    helm = Helm(helm_program(), folder)
    rendered = [
        item for case in cases for item in helm.template(case.values, namespace=NAMESPACE, apis=case.apis)
    ]
    objects = {json.dumps(item, sort_keys=True): item for item in rendered}
    for namespace in (NAMESPACE, *NAMESPACES):
        plane.kubectl("create", "namespace", namespace, check=False)
    apply = (
        "apply",
        "--server-side",
        "--force-conflicts",
        "--dry-run=server",
        "--validate=strict",
        "-f",
        "-",
    )
    document = {"apiVersion": "v1", "kind": "List", "items": list(objects.values())}
    said = plane.kubectl(*apply, stdin=json.dumps(document)).stdout
    assert len(said.splitlines()) == len(objects)


def test_objects_of_every_case_are_accepted(control_plane: ControlPlane, tmp_path: Path) -> None:
    accept(control_plane, tmp_path, [case for case in CASES.values() if not case.apis])


def test_every_toggle_and_monitors_are_accepted_where_the_cluster_has_them(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    plurals = ("podmonitors", "servicemonitors")
    for path in ecosystem_crds(tuple(f"monitoring.coreos.com_{plural}.yaml" for plural in plurals)):
        control_plane.kubectl("apply", "--server-side", "-f", str(path))
    for plural in plurals:
        crd = f"crd/{plural}.monitoring.coreos.com"
        control_plane.until_done("wait", "--for=condition=Established", "--timeout=60s", crd)
    cases = [case for case in CASES.values() if case.apis]
    accept(control_plane, tmp_path, [*cases, *toggles(values_schema(), default_values()).values()])
