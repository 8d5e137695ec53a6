"""`flowprefill logs`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowprefill.cli.problems import BAD_INPUT, fail, guarded
from flowprefill.cli.services import StateRoot, find_services, names_of

if TYPE_CHECKING:
    from flowprefill_operator.node.state import NodeStatus, StateDir

FOLLOW_EVERY_S = 0.2


def logs(
    pod: Annotated[
        str | None,
        typer.Argument(
            help="Pods whose name, with or without the service's, or role begins with this, or `supervisor`; "
            "all pods when left out."
        ),
    ] = None,
    service: Annotated[
        str | None,
        typer.Option(
            "--service", "-s", help="Name of the service; when left out, the one that runs or ran last."
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    tail: Annotated[int, typer.Option("--tail", "-n", min=0, help="Lines of each pod to begin with.")] = 50,
    state_dir: StateRoot = None,
) -> None:
    """Show what pods have written.

    Examples:

        flowprefill logs prefill -f

        flowprefill logs -n 5
    """
    with guarded():
        from flowprefill_operator.node.logs import Follower, last_lines

        found = find_services(state_dir, service, running=False)
        found = [state for state in found if state.is_running()] or sorted(found, key=_last_run)[-1:]
        if not found:
            fail("no service was ever brought up here")
        if len(found) > 1:
            fail(f"several services run ({names_of(found)}); choose one with --service", code=BAD_INPUT)
        state = found[0]
        paths = [path for path in sorted(state.logs.glob("*.log")) if _matches(path, pod, state)]
        if not paths:
            fail(f"no log of a pod {pod!r} in {state.logs}", code=BAD_INPUT)
        followers = {path: Follower(path) for path in paths}
        for path, follower in followers.items():
            follower.skip_to_end()
            _print_lines(path, last_lines(path, tail), many=len(paths) > 1)
        while follow:
            for path in sorted(state.logs.glob("*.log")):
                if path not in followers and _matches(path, pod, state):
                    followers[path] = Follower(path)
            for path, follower in followers.items():
                text = b"".join(follower.read()).decode(errors="replace")
                _print_lines(path, text.splitlines(), many=len(followers) > 1)
            try:
                time.sleep(FOLLOW_EVERY_S)
            except KeyboardInterrupt:
                return


def _last_run(state: StateDir) -> float:
    """When the service ran last, in seconds since the epoch; 0 when it never did."""
    try:
        return state.supervisor_log.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _matches(path: Path, pod: str | None, state: StateDir) -> bool:
    if pod is None:
        return path != state.supervisor_log
    if path.name.startswith((pod, f"{state.name}-{pod}")):
        return True
    status: NodeStatus | None = state.read_status()
    roles = {report.name: report.role for report in status.pods} if status else {}
    name = path.name.split(".", 1)[0]
    return roles.get(name, "").startswith(pod) if name in roles else f"-{pod}" in name


def _print_lines(path: Path, lines: list[str], *, many: bool) -> None:
    prefix = f"{path.name.removesuffix('.log')} | " if many else ""
    for line in lines:
        print(f"{prefix}{line}", flush=True)
