"""The operator is killed at every single write of a creation and of a rollout; what comes out is what always comes out."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.control_plane.kills import kill_everywhere
from support.control_plane.operated import operated
from support.control_plane.plane import ControlPlane

LEAST_CASES = 50


@pytest.mark.timeout(1500)
def test_killed_at_any_write_the_operator_ends_where_it_always_ends(
    plane: ControlPlane, tmp_path: Path
) -> None:
    with operated(plane, tmp_path) as cluster:
        kills = kill_everywhere(cluster)
    assert not kills.failures, "\n\n".join(kills.failures)
    assert kills.cases >= LEAST_CASES
