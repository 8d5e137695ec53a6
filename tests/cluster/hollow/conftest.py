"""One control plane for the whole folder, one hollow node for each module, one namespace for each case."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from support.control_plane.assets import assets
from support.control_plane.hollow import HollowNode
from support.control_plane.plane import ControlPlane

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """The newest supported Kubernetes."""
    programs = assets("newest")
    plane = ControlPlane(programs, tmp_path_factory.mktemp("hollow") / "control-plane")
    plane.start()
    yield plane
    plane.stop()


@pytest.fixture(scope="module")
def node(plane: ControlPlane) -> Iterator[HollowNode]:
    """A node that runs every pod at once unless a case says otherwise."""
    with HollowNode(plane, gpus=1000) as node:
        yield node


@pytest.fixture
def namespace(plane: ControlPlane, node: HollowNode) -> Iterator[str]:
    """A namespace of the case's own, deleted behind it; its rules of the node are taken back."""
    name = f"case-{next(_numbers)}"
    plane.kubectl("create", "namespace", name)
    yield name
    node.forget_all()
    plane.kubectl("delete", "namespace", name, "--wait=false")
