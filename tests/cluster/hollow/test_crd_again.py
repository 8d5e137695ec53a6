"""The CRD goes and comes back under an operator that runs. On a control plane of its own: the others need their CRD."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flowprefill_crd.crd import CRD_NAME
from flowprefill_operator.kinds import DEPLOYMENTS
from support.control_plane.assets import assets
from support.control_plane.operated import Operated, install_crd, operated, seconds_until, simulated
from support.control_plane.plane import ControlPlane
from support.control_plane.waiting import until

WATCHED_S = 10.0
"""Until a service is acted on: far below the 60 s of the next look at everything."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    """An operator and a control plane that nobody else uses."""
    plane = ControlPlane(assets("newest"), tmp_path_factory.mktemp("alone") / "control-plane")
    plane.start()
    with operated(plane, tmp_path_factory.mktemp("operator")) as found:
        yield found
    plane.stop()


def test_services_are_watched_again_after_the_crd_was_gone(alone: Operated) -> None:
    alone.plane.kubectl("create", "namespace", "team")
    alone.apply("team", simulated("before"))
    alone.wait_ready("team", "before")
    alone.plane.kubectl("delete", "crd", CRD_NAME)
    until(lambda: not alone.operator.answers("/readyz"), "the operator misses the CRD", within_s=30.0)
    install_crd(alone.plane)
    alone.operator.wait_ready()
    for name in ("one", "two"):  # the second cannot be found by a look that the first has caused
        alone.apply("team", simulated(name))
        seconds_until(
            lambda name=name: alone.list(DEPLOYMENTS, "team", **{"flowprefill.io/service": name}),
            f"Deployments of {name}",
            within_s=WATCHED_S,
        )
    for name in ("one", "two"):
        alone.wait_ready("team", name)
