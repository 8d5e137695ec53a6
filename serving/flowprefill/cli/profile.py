"""`flowprefill profile`: what a profiling Job runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowprefill.cli.problems import guarded


def profile(
    config: Annotated[
        Path, typer.Option("--config", help="The pod configuration, a JSON file, as for `flowprefill serve`.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="File for the profile; standard output when left out."),
    ] = None,
) -> None:
    """Measure prefill times of a model on this machine, for the predictor of its prefill pods.

    The profile is JSON of at most 4,096 bytes, so that it fits a container's termination message. When it
    cannot be measured the command ends with 1, and the file holds the reason.

    Example: flowprefill profile --config config.json --output profile.json
    """
    with guarded():
        from flowprefill.server.profile_job import run

        code = run(config_path=config, output=output)
    raise typer.Exit(code)
