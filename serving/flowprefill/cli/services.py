"""Services on this machine, as the commands name and find them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowprefill.cli.problems import BAD_INPUT, fail

if TYPE_CHECKING:
    from flowprefill_crd import FlowPrefillService
    from flowprefill_operator.node.state import StateDir

STDIN = "-"

Name = Annotated[
    str | None, typer.Argument(help="Name of the service, or NAMESPACE/NAME; not needed while there is one.")
]
StateRoot = Annotated[
    Path | None,
    typer.Option("--state-dir", help="Where services are kept; ~/.local/state/flowprefill when left out."),
]


def read_services(file: Path) -> tuple[FlowPrefillService, ...]:
    """The services in a file, or on standard input when it is `-`, as kubectl takes it. Raises `InvalidService`."""
    from flowprefill_crd import load_services, parse_services

    if str(file) != STDIN:
        return load_services(file)
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        fail("standard input: is not UTF-8 text", code=BAD_INPUT)
    return parse_services(text, source="standard input")


def read_service(file: Path) -> FlowPrefillService:
    """The one service in a file, or on standard input when it is `-`. Raises `InvalidService`."""
    services = read_services(file)
    if len(services) != 1:
        where = "standard input" if str(file) == STDIN else file
        fail(
            f"{where} holds {len(services)} services; this command takes one, give each its own file",
            code=BAD_INPUT,
        )
    return services[0]


def state_of(root: Path | None, namespace: str, name: str) -> StateDir:
    from flowprefill_operator.node.state import StateDir, default_root

    return StateDir((root or default_root()).absolute(), namespace=namespace, name=name)


def made(state: StateDir) -> StateDir:
    """The state with its folder on disk; fails with the folder and the reason where there can be none."""
    try:
        return state.create()
    except OSError as error:
        fail(
            f"the state folder {state.path} cannot be made ({error.strerror}); "
            f"choose another place with --state-dir"
        )


def find_services(root: Path | None, name: str | None, *, running: bool) -> list[StateDir]:
    from flowprefill_operator.node.state import default_root, find

    known = find((root or default_root()).absolute())
    if name is not None:
        known = [state for state in known if name in (state.name, f"{state.namespace}/{state.name}")]
        if not known:
            fail(f"no service {name!r} was brought up here", code=BAD_INPUT)
    return [state for state in known if not running or state.is_running() or not state.is_empty()]


def names_of(found: list[StateDir]) -> str:
    return ", ".join(f"{state.namespace}/{state.name}" for state in found)


def text_of(service: FlowPrefillService) -> str:
    """The service as the supervisor reads it again: as written, with nothing but what was set."""
    import yaml

    body = service.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"status"})
    body |= {"apiVersion": service.api_version, "kind": service.kind}
    return str(yaml.safe_dump(body, sort_keys=False))


def supervisor_argv(state: StateDir) -> list[str]:
    return [
        sys.executable,
        "-m",
        "flowprefill.cli",
        "supervise",
        str(state.root),
        state.namespace,
        state.name,
    ]
