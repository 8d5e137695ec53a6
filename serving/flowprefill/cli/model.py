"""`flowprefill model`: fetching models."""

from __future__ import annotations

from typing import Annotated

import typer

from flowprefill.cli.problems import guarded

app = typer.Typer(no_args_is_help=True, help="Fetch models before servers need them.")


@app.callback()
def _model() -> None:
    """Fetch models before servers need them."""


@app.command()
def pull(
    uri: Annotated[
        str, typer.Argument(help="embedded://NAME, hf://ORG/NAME, hf://ORG/NAME@REVISION or file:///PATH")
    ],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of an hf:// model; main when left out.")
    ] = None,
) -> None:
    """Fetch a model into the cache and check it; does nothing when it is there already.

    Example: flowprefill model pull embedded://smollm2-135m-instruct
    """
    with guarded():
        from flowprefill.cli.progress import ProgressBar
        from flowprefill.engines.models import resolve_model

        with ProgressBar(f"fetching {uri}") as bar:
            resolved = resolve_model(uri, revision, progress=bar.update)
    print(f"{resolved.name} {resolved.revision} is at {resolved.path}")
