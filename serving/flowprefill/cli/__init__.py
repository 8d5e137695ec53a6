"""The `flowprefill` command. Every command imports what it runs only when it runs, so that `flowprefill proxy` needs
no torch and `flowprefill serve` nothing of the operator."""

from __future__ import annotations

from typing import Annotated

import typer

from flowprefill.cli import bench, figures, log_view, model, node, operator, profile, render, serve
from flowprefill.cli.problems import guarded

app = typer.Typer(
    name="flowprefill",
    help="""Serve a model with promises on the time to the first token.

    A service is one file: a model, SLO classes, and how many prefill and decode pods. Try it on this machine:

        flowprefill up -f quickstart.yaml      start it; Ctrl-C stops it

        flowprefill status                     what runs, and how well promises are kept

        flowprefill render -f quickstart.yaml  the Kubernetes objects that the operator would create
    """,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

UP, OBJECTS, POD = "On this machine", "For Kubernetes", "Inside a pod"

app.command(rich_help_panel=UP)(node.up)
app.command(rich_help_panel=UP)(node.down)
app.command(rich_help_panel=UP)(node.status)
app.command(rich_help_panel=UP)(log_view.logs)
app.command(rich_help_panel=UP)(bench.demo)
app.command(hidden=True)(node.supervise)
app.command(rich_help_panel=OBJECTS)(render.render)
app.command(rich_help_panel=OBJECTS)(operator.operator)
app.command(rich_help_panel=POD)(serve.serve)
app.command(rich_help_panel=POD)(serve.proxy)
app.command(rich_help_panel=POD)(profile.profile)
app.add_typer(figures.app, name="bench", rich_help_panel=UP)
app.add_typer(model.app, name="model", rich_help_panel=POD)


@app.command()
def version(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also Python and the libraries that matter.")
    ] = False,
) -> None:
    """Print the version."""
    with guarded():
        import importlib.metadata
        import platform

        print(importlib.metadata.version("flowprefill"))
        if verbose:
            print(f"python {platform.python_version()} on {platform.platform()}")
            for name in ("torch", "transformers", "vllm", "fastapi", "kopf"):
                try:
                    print(f"{name} {importlib.metadata.version(name)}")
                except importlib.metadata.PackageNotFoundError:
                    print(f"{name} is not installed")


def main() -> None:
    """Entry point of the command line."""
    app()
