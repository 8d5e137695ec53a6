"""`flowprefill model`: fetching models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from flowprefill.cli.problems import guarded
from flowprefill.engines import pin as pins

app = typer.Typer(no_args_is_help=True, help="Fetch models before servers need them.")

LIMIT_BYTES = 4096
"""Of a container's last words Kubernetes keeps no more."""


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
    commit: Annotated[
        str | None,
        typer.Option(
            envvar=pins.COMMIT_VARIABLE,
            help="Commit of an hf:// model to fetch, whatever the revision stands for now.",
        ),
    ] = None,
    pin: Annotated[
        Path | None,
        typer.Option(
            envvar=pins.PIN_VARIABLE,
            help="File that keeps the commit of an hf:// model; one that is there is followed, but for --commit.",
        ),
    ] = None,
    termination_log: Annotated[
        Path | None,
        typer.Option(
            help='File for the commit of an hf:// model, {"commit": "..."}, or for why it is not here.'
        ),
    ] = None,
) -> None:
    """Fetch a model into the cache and check it; does nothing when it is there already.

    Example: flowprefill model pull embedded://smollm2-135m-instruct
    """
    with guarded(), _last_words(termination_log):
        from flowprefill.cli.progress import ProgressBar
        from flowprefill.engines.models import resolve_model

        if commit is None and pin is not None:
            commit = pins.read(pin)
        with ProgressBar(f"fetching {uri}") as bar:
            resolved = resolve_model(uri, revision, commit=commit, progress=bar.update)
        if uri.startswith("hf://"):
            if pin is not None:
                pins.write(pin, resolved.revision)
            if termination_log is not None:
                _write(termination_log, pins.as_json(resolved.revision))
    print(f"{resolved.name} {resolved.revision} is at {resolved.path}")


@contextlib.contextmanager
def _last_words(file: Path | None) -> Iterator[None]:
    """Leave in `file` why there is no model, so that it is told with the container's state."""
    from flowprefill.errors import FlowPrefillError

    try:
        yield
    except FlowPrefillError as error:
        if file is not None:
            _write(file, str(error))
        raise


def _write(file: Path, text: str) -> None:
    # In place: a termination log is a mounted file, which nothing can be renamed over.
    file.write_text(text.encode()[:LIMIT_BYTES].decode(errors="ignore"), encoding="utf-8")
