"""Real control planes, one of each supported end, started once and shared."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.control_plane.assets import RELEASES, assets
from support.control_plane.plane import ControlPlane


@pytest.fixture(scope="session", params=RELEASES)
def control_plane(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    """The newest and the oldest supported Kubernetes, one after the other."""
    programs = assets(request.param)
    plane = ControlPlane(programs, tmp_path_factory.mktemp("control-plane") / request.param)
    plane.start()
    yield plane
    plane.stop()
