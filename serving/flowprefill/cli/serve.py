"""The commands that run inside pods."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flowprefill.cli.problems import BAD_INPUT, fail, guarded


class ServeRole(StrEnum):
    prefill = "prefill"
    decode = "decode"
    colocated = "colocated"


class Discover(StrEnum):
    kubernetes = "kubernetes"


Config = Annotated[
    Path, typer.Option("--config", help="The pod configuration, a JSON file.", exists=True, dir_okay=False)
]
Live = Annotated[
    Path,
    typer.Option("--live", help="The live configuration: a folder with live.json, or the file. Watched."),
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65_535, help="Port of the OpenAI API.")]
AdminPort = Annotated[int, typer.Option(min=0, max=65_535, help="Port of health, metrics and state.")]


def serve(
    role: Annotated[ServeRole, typer.Option(help="What this pod computes.")],
    config: Config,
    live: Live,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    admin_port: AdminPort = 9000,
    kv_port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port that decode pods pull KV blocks from.")
    ] = 7000,
) -> None:
    """Run a prefill, decode or colocated server.

    The operator and `flowprefill up` write its two configuration files; to run one by hand, take them from
    `flowprefill render`.

    Example: flowprefill serve --role prefill --config config.json --live live/
    """
    with guarded():
        from flowprefill.server.main import run

        code = run(
            role=role.value,
            config_path=config,
            live_path=live,
            host=host,
            port=port,
            admin_port=admin_port,
            kv_port=kv_port,
        )
    raise typer.Exit(code)


def proxy(
    config: Config,
    live: Live,
    endpoints: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File that lists the pods, as `flowprefill up` writes it. Watched."
        ),
    ] = None,
    discover: Annotated[
        Discover | None,
        typer.Option(help="Find the pods through the API server: EndpointSlices of the service's namespace."),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    admin_port: AdminPort = 9000,
) -> None:
    """Run the proxy that clients talk to.

    Example: flowprefill proxy --config config.json --live live/ --endpoints endpoints.json
    """
    if (endpoints is None) == (discover is None):
        given = "neither" if endpoints is None else "both"
        fail(
            f"where are the pods? {given} came, accepted is one of --endpoints FILE and --discover kubernetes",
            code=BAD_INPUT,
        )
    with guarded():
        from flowprefill.proxy.main import run

        code = run(
            config_path=config,
            live_path=live,
            endpoints_path=endpoints,
            host=host,
            port=port,
            admin_port=admin_port,
        )
    raise typer.Exit(code)
