"""Real control planes, one of each supported end, started once and shared."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.control_plane.assets import RELEASES, Release, assets, disposable_kubeconfig, has_assets
from support.control_plane.kubectl import Kubectl
from support.control_plane.plane import ControlPlane


@pytest.fixture(scope="session", params=RELEASES)
def release(request: pytest.FixtureRequest) -> Release:
    """The newest and the oldest supported Kubernetes, one after the other."""
    found: Release = request.param
    return found


@pytest.fixture(scope="session")
def control_plane(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane of that release."""
    plane = ControlPlane(assets(release), tmp_path_factory.mktemp("control-plane") / release)
    plane.start()
    yield plane
    plane.stop()


@pytest.fixture(scope="session")
def api_server(
    release: Release, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Kubectl:
    """An API server for tests that need no more: of a control plane, or of the user's disposable cluster.

    That cluster stands in for the newest release alone, where no programs are here.
    """
    disposable = disposable_kubeconfig()
    if release == "newest" and disposable is not None and not has_assets(release):
        program = shutil.which("kubectl")
        assert program is not None, f"{disposable} is to be used, and there is no kubectl on PATH"
        return Kubectl(Path(program), disposable, tmp_path_factory.mktemp("kubectl"))
    plane: ControlPlane = request.getfixturevalue("control_plane")
    return plane
