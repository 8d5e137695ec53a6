"""The operator killed at every write, with the write lost and with its answer lost."""

from __future__ import annotations

from collections.abc import Iterator

from cluster_figures.stage import stage
from flowprefill.bench.figures.row import Bench, Figure, Row
from support.control_plane.kills import CONVERGED_S, kill_everywhere

LEAST_CASES = 50


def kill(bench: Bench) -> Iterator[Row]:
    """Cases that do not reach the end state of an undisturbed run in time."""
    bench.progress.step("kills at every write of a creation and of a rollout")
    with stage() as cluster:
        kills = kill_everywhere(cluster)
    command = "flowprefill bench figures --set cluster --only kill"
    yield Row(
        name="kill cases that do not converge",
        value=len(kills.failures),
        op="<=",
        bar=0,
        command=command,
        detail=f"{kills.cases} kills; {CONVERGED_S:.0f} s from the restart",
    )
    yield Row(name="kill cases", value=kills.cases, op=">=", bar=LEAST_CASES, command=command)


FIGURES = (Figure(name="kill", summary="the operator killed at every write", minutes=10, measure=kill),)
