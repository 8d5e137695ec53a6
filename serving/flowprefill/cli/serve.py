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


class ServeEngine(StrEnum):
    vllm = "vllm"


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
    vllm_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM FLAGS]", help="Any flags of vllm serve, with --engine vllm."),
    ] = None,
    role: Annotated[
        ServeRole | None, typer.Option(help="What this pod computes; with --engine, colocated by default.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="The pod configuration, a JSON file.", exists=True, dir_okay=False),
    ] = None,
    live: Annotated[
        Path | None,
        typer.Option("--live", help="The live configuration: a folder with live.json, or the file. Watched."),
    ] = None,
    engine: Annotated[
        ServeEngine | None, typer.Option(help="Without --config: the engine to run, on the model in --model.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="With --engine: hf://ORG/NAME, ORG/NAME, a directory or embedded://NAME.",
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    admin_port: AdminPort = 9000,
    kv_port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port that decode pods pull KV blocks from.")
    ] = 7000,
) -> None:
    """Run a prefill, decode or colocated server.

    The operator and `flowprefill up` write its two configuration files; to run one by hand, take them from
    `flowprefill render`. vLLM with the preemptive engine runs without files too.

    Example: flowprefill serve --role prefill --config config.json --live live/

    Example: flowprefill serve --engine vllm --model Qwen/Qwen3-8B -- --max-model-len 32768
    """
    if config is not None:
        if engine is not None or model is not None:
            given = "--engine" if engine is not None else "--model"
            fail(
                f"{given} came with --config, which names engine and model; accepted is one of both",
                code=BAD_INPUT,
            )
        if vllm_args:
            fail(f"{vllm_args[0]!r} came with --config; flags of vLLM are its engine.args", code=BAD_INPUT)
        if role is None or live is None:
            missing = "--role" if role is None else "--live"
            fail(f"{missing} is missing; --config, --live and --role go together", code=BAD_INPUT)
    elif engine is None or model is None:
        missing = "--config FILE or --engine vllm" if engine is None else "--model MODEL"
        fail(f"{missing} is missing; see flowprefill serve --help", code=BAD_INPUT)
    with guarded():
        if config is not None:
            from flowprefill.server.main import run

            assert role is not None
            assert live is not None
            code = run(
                role=role.value,
                config_path=config,
                live_path=live,
                host=host,
                port=port,
                admin_port=admin_port,
                kv_port=kv_port,
            )
        else:
            from flowprefill.server.vllm.by_hand import run_by_hand

            assert model is not None
            code = run_by_hand(
                model=model,
                role="colocated" if role is None else role.value,
                args=vllm_args or (),
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
