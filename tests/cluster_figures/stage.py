"""The stage that the figures are measured on: a control plane, a hollow node and the operator with the chart's rights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from _pytest.outcomes import Failed, Skipped

from flowprefill.errors import InvalidConfiguration
from support.control_plane.assets import assets
from support.control_plane.operated import Operated, operated
from support.control_plane.operator_identity import ACCOUNT, SYSTEM_NAMESPACE
from support.control_plane.plane import ControlPlane

Found = TypeVar("Found")

OPERATOR = f"system:serviceaccount:{SYSTEM_NAMESPACE}:{ACCOUNT}"
"""The operator as the audit log names it."""


def have(find: Callable[[], Found]) -> Found:
    """What the tests' own machinery finds. Raises InvalidConfiguration with its words where a test would skip."""
    try:
        return find()
    except (Skipped, Failed) as error:
        raise InvalidConfiguration(str(error)) from error


@contextmanager
def control_plane() -> Iterator[tuple[ControlPlane, Path]]:
    """The newest supported Kubernetes, and a folder that goes away with it."""
    programs = have(lambda: assets("newest"))
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
