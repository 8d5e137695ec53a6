"""The stage that the figures are measured on: a control plane, a hollow node and the operator with the chart's rights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowprefill.errors import InvalidConfiguration
from support.control_plane.assets import assets
from support.control_plane.operated import Operated, operated
from support.control_plane.operator_identity import ACCOUNT, SYSTEM_NAMESPACE
from support.control_plane.plane import ControlPlane

OPERATOR = f"system:serviceaccount:{SYSTEM_NAMESPACE}:{ACCOUNT}"
"""The operator as the audit log names it."""


@contextmanager
def control_plane() -> Iterator[tuple[ControlPlane, Path]]:
    """The newest supported Kubernetes, and a folder that goes away with it."""
    try:
        programs = assets("newest")
    except BaseException as error:  # a skip of pytest
        raise InvalidConfiguration(f"there is no control plane: {error}; run make control-plane") from error
    with tempfile.TemporaryDirectory(prefix="flowprefill-figures-") as folder:
        plane = ControlPlane(programs, Path(folder) / "control-plane")
        plane.start()
        try:
            yield plane, Path(folder)
        finally:
            plane.stop()


@contextmanager
def stage(**config: object) -> Iterator[Operated]:
    """All of it, the operator at work. `config` as for `OperatorProcess`."""
    with control_plane() as (plane, folder), operated(plane, folder, **config) as found:
        yield found
