"""What the chart renders for many values is accepted, field by field, by real API servers."""

from __future__ import annotations

import json
from pathlib import Path

from support.control_plane.plane import ControlPlane
from support.ecosystem import ecosystem_crds
from support.helm import Helm, helm_program
from support.helm_values import CASES, NAMESPACES

NAMESPACE = "chart-objects"


def accept(plane: ControlPlane, folder: Path, names: list[str]) -> None:
    """All objects of the cases in one strict dry run. The release is called like its case, to be told in errors."""
    helm = Helm(helm_program(), folder)
    objects = [
        item
        for name in names
        for item in helm.template(CASES[name].values, name=name, namespace=NAMESPACE, apis=CASES[name].apis)
    ]
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
    document = {"apiVersion": "v1", "kind": "List", "items": objects}
    said = plane.kubectl(*apply, stdin=json.dumps(document)).stdout
    assert len(said.splitlines()) == len(objects)


def test_objects_of_every_kind_of_values_are_accepted(control_plane: ControlPlane, tmp_path: Path) -> None:
    accept(control_plane, tmp_path, [name for name, case in CASES.items() if not case.apis])


def test_monitors_are_accepted_where_the_cluster_has_them(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    plurals = ("podmonitors", "servicemonitors")
    for path in ecosystem_crds(tuple(f"monitoring.coreos.com_{plural}.yaml" for plural in plurals)):
        control_plane.kubectl("apply", "--server-side", "-f", str(path))
    for plural in plurals:
        crd = f"crd/{plural}.monitoring.coreos.com"
        control_plane.kubectl("wait", "--for=condition=Established", "--timeout=60s", crd)
    accept(control_plane, tmp_path, [name for name, case in CASES.items() if case.apis])
