"""One control plane for the whole folder, one node and one operator for each module, one namespace for each case.

Budget: 10 minutes for the folder on 2 cores in 2 processes, test_kill.py apart. About so many seconds in one process:
life cycle 65, status 60, drift 35, autoscaling 55, names and deletion 120, API server 130 (90 of them the promise for a
silent watch), surroundings 120, upgrade 75, oldest 25, namespaces 20, the machinery's own cases 40.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from support.control_plane.assets import assets
from support.control_plane.hollow import HollowNode
from support.control_plane.operated import Operated, install_crd, operated
from support.control_plane.plane import ControlPlane, Surroundings

_numbers = itertools.count(1)

QUICK_AUTOSCALER = (
    "--horizontal-pod-autoscaler-sync-period=2s",
    "--horizontal-pod-autoscaler-downscale-stabilization=4s",
    "--horizontal-pod-autoscaler-cpu-initialization-period=1s",
    "--horizontal-pod-autoscaler-initial-readiness-delay=1s",
)
"""What a real cluster waits minutes for."""


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """The newest supported Kubernetes."""
    programs = assets("newest")
    around = Surroundings(manager_flags=QUICK_AUTOSCALER)
    plane = ControlPlane(programs, tmp_path_factory.mktemp("hollow") / "control-plane", around)
    plane.start()
    install_crd(plane)  # early: the garbage collector learns of a kind up to 30 s later
    yield plane
    plane.stop()


@pytest.fixture(scope="module")
def cluster(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    """An operator at work."""
    with operated(plane, tmp_path_factory.mktemp("operator")) as found:
        yield found


@pytest.fixture(scope="module")
def node(plane: ControlPlane) -> Iterator[HollowNode]:
    """A node without an operator."""
    with HollowNode(plane) as node:
        yield node


@pytest.fixture
def namespace(plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the case's own, deleted behind it; its rules and faults are taken back."""
    name = f"case-{next(_numbers)}"
    plane.kubectl("create", "namespace", name)
    yield name
    for used in ("node", "cluster"):
        if used in request.fixturenames:
            found = request.getfixturevalue(used)
            node = found.node if isinstance(found, Operated) else found
            node.forget_all()
            if isinstance(found, Operated):
                found.faulty.heal()
    plane.kubectl("delete", "namespace", name, "--wait=false")
