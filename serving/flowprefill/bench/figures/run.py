"""Measuring a set of figures and writing them down."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from flowprefill.bench.figures.row import Bench, Figure, Row
from flowprefill.bench.show import environment
from flowprefill.errors import InvalidConfiguration

SETS: dict[str, tuple[str, ...]] = {
    "local": (
        "flowprefill.bench.figures.engine",
        "flowprefill.bench.figures.scheduler",
        "flowprefill.bench.figures.service",
    ),
    # Measured on a control plane by the tests' own machinery, which only a checkout has.
    "cluster": (
        "cluster_figures.speed",
        "cluster_figures.scale",
        "cluster_figures.faults",
        "cluster_figures.requests",
    ),
    # Measured with vLLM's engine core in this process, in vLLM's environment.
    "vllm": ("vllm_figures.exactness", "vllm_figures.points", "vllm_figures.against_stock"),
}
CHECKOUT = Path(__file__).parents[4] / "tests"


def figures_of(name: str) -> tuple[Figure, ...]:
    """The measurements of a set. Raises InvalidConfiguration for an unknown one."""
    if name not in SETS:
        raise InvalidConfiguration(f"there is no set {name!r}; accepted are {', '.join(SETS)}")
    if any(not module.startswith("flowprefill.") for module in SETS[name]):
        if not CHECKOUT.is_dir():
            raise InvalidConfiguration(
                f"the set {name!r} is measured from a checkout of the repository; clone it"
            )
        sys.path.insert(0, str(CHECKOUT))
    return tuple(figure for module in SETS[name] for figure in import_module(module).FIGURES)


def chosen(figures: Sequence[Figure], only: Sequence[str]) -> tuple[Figure, ...]:
    """The figures named in `only`, all when it is empty. Raises InvalidConfiguration for an unknown name."""
    names = [figure.name for figure in figures]
    for name in only:
        if name not in names:
            raise InvalidConfiguration(f"there is no figure {name!r}; accepted are {', '.join(names)}")
    return tuple(figure for figure in figures if not only or figure.name in only)


def measure(
    figures: Sequence[Figure], bench: Bench, output: Path, *, on_row: Callable[[Row], None] = lambda row: None
) -> tuple[Row, ...]:
    """Measure one after the other; `output` is written after every row, so that an interrupted run keeps its rows.

    Rows of other figures that `output` holds from an earlier run are kept only when nothing else changed: same
    commit, same versions, same machine.
    """
    about = environment()
    rows: dict[str, dict[str, object]] = _earlier(output, about)
    measured: list[Row] = []
    for figure in figures:
        for row in figure.measure(bench):
            measured.append(row)
            rows[row.name] = row.as_json()
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(about | {"rows": list(rows.values())}, indent=2) + "\n")
            on_row(row)
    return tuple(measured)


def _earlier(output: Path, about: dict[str, object]) -> dict[str, dict[str, object]]:
    try:
        body = json.loads(output.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    rows = body.pop("rows", [])
    return {row["name"]: row for row in rows} if body == json.loads(json.dumps(about)) else {}
