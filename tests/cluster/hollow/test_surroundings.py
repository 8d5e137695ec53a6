"""What changes around the operator while it runs: other projects' CRDs, its own CRD, its rights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.control_plane.operated import Operated, operated, simulated
from support.control_plane.plane import ControlPlane
from support.control_plane.waiting import until

Json = dict[str, Any]


@pytest.fixture(scope="module")
def cluster(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    """An operator that looks at everything every 2 seconds: what is found by polling is found soon."""
    with operated(plane, tmp_path_factory.mktemp("operator"), resyncSeconds=2) as found:
        yield found


def test_the_schema_of_another_release_is_told(cluster: Operated, namespace: str) -> None:
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/flowprefillservices.flowprefill.io"
    crd = cluster.http.get(path).json()
    notes = crd["metadata"]["annotations"]
    (hash_name,) = [name for name in notes if name.startswith("flowprefill.io/")]
    cluster.apply(namespace, simulated("web"))
    cluster.wait_ready(namespace, "web")
    header = {"content-type": "application/merge-patch+json"}

    def annotate(value: str) -> None:
        body = {"metadata": {"annotations": {hash_name: value}}}
        assert cluster.http.patch(path, json=body, headers=header).is_success

    annotate("of-another-release")
    try:
        cluster.wait_condition(namespace, "web", "SchemaCurrent", "False", reason="CRDOutdated")
        cluster.wait_condition(namespace, "web", "Available", "True")
    finally:
        annotate(notes[hash_name])
    until(lambda: "SchemaCurrent" not in cluster.conditions(namespace, "web"), "it is over")
