"""`flowprefill operator`: the Kubernetes operator's process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowprefill.cli.problems import guarded


def operator(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="The operator's configuration, a YAML file as the chart renders it; defaults when left out.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
) -> None:
    """Run the Kubernetes operator.

    Inside a cluster it uses its ServiceAccount, elsewhere your kubeconfig. The chart (charts/flowprefill) installs the
    CustomResourceDefinition and grants what it needs.

    Example: flowprefill operator --config operator.yaml
    """
    with guarded():
        from flowprefill.logs import configure_logging
        from flowprefill_operator.config import load_config
        from flowprefill_operator.controller.main import run

        settings = load_config(config)
        configure_logging(settings.log_format, settings.log_level)
        code = run(settings)
    raise typer.Exit(code)
