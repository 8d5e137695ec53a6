"""The CRD goes and comes back under an operator that runs. On a control plane of its own: the others need their CRD."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flowprefill_crd.crd import CRD_NAME
from flowprefill_operator.kinds import DEPLOYMENTS
from support.control_plane.assets import assets
from support.control_plane.operated import Operated, install_crd, operated, simulated
from support.control_plane.plane import ControlPlane
from support.control_plane.waiting import until

LOOKS_EVERY_S = 20
WATCHED_S = 10.0
"""Until a service is acted on, from right after a look at everything: the next one comes too late to be the reason."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    """An operator and a control plane that nobody else uses."""
    plane = ControlPlane(assets("newest"), tmp_path_factory.mktemp("alone") / "control-plane")
    plane.start()
    with operated(plane, tmp_path_factory.mktemp("operator"), resyncSeconds=LOOKS_EVERY_S) as found:
        yield found
    plane.stop()


def test_services_are_watched_again_after_the_crd_was_gone(alone: Operated) -> None:
    alone.plane.kubectl("create", "namespace", "team")
    alone.apply("team", simulated("before"))
    alone.wait_ready("team", "before")
    alone.plane.kubectl("delete", "crd", CRD_NAME)
    until(
        lambda: not alone.operator.answers("/readyz"),
        "the operator misses the CRD",
        within_s=3.0 * LOOKS_EVERY_S,
    )
    install_crd(alone.plane)
    alone.operator.wait_ready()
    seen = looks(alone)
    until(lambda: looks(alone) > seen, "a look", within_s=3.0 * LOOKS_EVERY_S)
    alone.apply("team", simulated("after"))
    until(
        lambda: alone.list(DEPLOYMENTS, "team", **{"flowprefill.io/service": "after"}),
        "Deployments",
        within_s=WATCHED_S,
    )
    alone.wait_ready("team", "after")


def looks(cluster: Operated) -> float:
    """How often the operator has looked at everything."""
    families = text_string_to_metric_families(cluster.operator.metrics())
    return sum(s.value for f in families for s in f.samples if s.name == "flowprefill_operator_resyncs_total")
