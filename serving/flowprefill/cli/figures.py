"""`flowprefill bench`: measurements."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowprefill.cli.problems import guarded

if TYPE_CHECKING:
    from flowprefill.bench.target import Target
    from flowprefill_crd import FlowPrefillService

app = typer.Typer(no_args_is_help=True, help="Measure this machine.")


@app.callback()
def _bench() -> None:
    """Measure this machine."""


@app.command()
def figures(
    set_name: Annotated[
        str, typer.Option("--set", help="Which set: local, or (from a checkout) cluster or vllm.")
    ] = "local",
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Measure just this figure; may be given several times.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the rows as JSON.")] = Path(
        "results/figures.json"
    ),
    listing: Annotated[bool, typer.Option("--list", help="Print the figures and end.")] = False,
) -> None:
    """Measure the figures that the documentation claims, on this machine, as ratios within one run.

    Exits with 1 when a figure misses its bar.

    Examples:

        flowprefill bench figures --list

        flowprefill bench figures --only packing --only events
    """
    with guarded():
        from flowprefill.bench.figures.row import Bench, Row
        from flowprefill.bench.figures.run import chosen, figures_of, measure
        from flowprefill.bench.show import Screen, new_console

        console = new_console()
        wanted = chosen(figures_of(set_name), only or ())
        if listing:
            for figure in wanted:
                console.print(f"{figure.name:<12} {figure.minutes:>4} min  {figure.summary}")
            return
        screen = Screen(console)

        def tell(row: Row) -> None:
            screen.close()
            mark = "[green]holds[/]" if row.holds else "[red]misses[/]"
            console.print(f"{mark}  {row.value:.4g} {row.op} {row.bar:g}  {row.name}", soft_wrap=True)
            if row.detail:
                console.print(f"       [dim]{row.detail}[/]", soft_wrap=True)

        rows: list[Row] = []
        for figure in wanted:
            screen.step(f"{figure.name}: {figure.summary}, about {figure.minutes:g} min")
            rows += measure([figure], Bench(new_target=new_target, progress=screen), output, on_row=tell)
        console.print(f"{sum(row.holds for row in rows)} of {len(rows)} hold; written to {output}")
        raise typer.Exit(0 if all(row.holds for row in rows) else 1)


@contextlib.contextmanager
def new_target(service: FlowPrefillService) -> Iterator[Target]:
    """A service on the local node in a folder that goes away with it."""
    from flowprefill.cli.target import LocalTarget

    with tempfile.TemporaryDirectory(prefix="flowprefill-bench-") as root:
        target = LocalTarget(Path(root), service)
        try:
            yield target
        finally:
            target.stop()
