"""Bringing a service up on this machine, in this process or in one of its own, and talking to one that runs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from flowprefill_operator.node.pod import Machine
from flowprefill_operator.node.state import (
    NodeStatus,
    Options,
    StateDir,
    default_cache,
    default_claims,
    write_atomically,
)
from flowprefill_operator.node.supervisor import CannotStart, Supervisor
from flowprefill_operator.plan import plan
from flowprefill_operator.settings import LocalPlaces, PlanSettings

_log = logging.getLogger(__name__)

LEFTOVERS_S = 20.0
"""How long to wait for the processes of a supervisor that was killed; their shims stop them within seconds."""
POLL_S = 0.1


def local_settings(state: StateDir, options: Options) -> PlanSettings:
    """Settings that plan a service for this machine."""
    places = LocalPlaces(
        endpoints=state.endpoints.parent, claims=default_claims(), cache=default_cache(), files=options.files
    )
    return PlanSettings(network_policy=False, local=places)


def supervise(state: StateDir, *, on_status: Callable[[NodeStatus], None] = lambda _: None) -> None:
    """Run the service in `state` until a signal stops it. No pod is left when this returns or raises.

    The supervisor's lock is held until this process ends, so that whoever waits for it waits for all of it.

    Reads `service.yaml` and `options.json`. Raises CannotStart when it runs already, or cannot on this machine, and
    InvalidDocument when the service is not valid.
    """
    options = state.read_options()
    settings = local_settings(state, options)
    if not state.hold("supervisor", wait_s=1.0):
        raise CannotStart(f"service {state.name!r} runs already")
    with state.lock("processes", wait_s=LEFTOVERS_S) as processes:
        if processes is None:
            raise CannotStart(
                f"processes of an earlier run of {state.name!r} have not ended; see {state.logs}"
            )
        machine = Machine(
            pods=state.pods,
            logs=state.logs,
            config=state.config,
            claims=default_claims(),
            files=options.files,
            environment=environment(),
            keep_open=(processes,),
        )

        async def run() -> None:
            supervisor = Supervisor(
                state,
                plan=lambda service: plan(service, settings),
                machine=machine,
                options=options,
                on_status=on_status,
            )
            await supervisor.run()

        asyncio.run(run())


def environment() -> dict[str, str]:
    """What processes inherit: this environment, with the programs beside this Python found first."""
    inherited = dict(os.environ)
    beside = str(Path(sys.executable).parent)
    inherited["PATH"] = os.pathsep.join([beside, inherited.get("PATH", os.defpath)])
    # Logs are read while they are written.
    inherited.setdefault("PYTHONUNBUFFERED", "1")
    return inherited


def write_service(state: StateDir, text: str) -> str:
    """Put the service's document in place; the digest by which the supervisor reports that it is in use."""
    write_atomically(state.service, text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def start_detached(state: StateDir, argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start `argv`, a command that supervises `state`; it lives on when this process and its terminal go."""
    with state.supervisor_log.open("ab") as log:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def follow(state: StateDir, *, timeout_s: float) -> Iterator[NodeStatus]:
    """Each new status of a running supervisor, until it ends or the time is over."""
    deadline = time.monotonic() + timeout_s
    seen: NodeStatus | None = None
    while time.monotonic() < deadline:
        running = state.is_running()
        status = state.read_status()
        if status is not None and status != seen:
            seen = status
            yield status
        if not running:
            return
        time.sleep(POLL_S)


def stop(state: StateDir, *, timeout_s: float, now: bool = False) -> bool:
    """Stop the service and wait until nothing of it is left; False when something still is.

    `now` kills the pods without grace.
    """
    deadline = time.monotonic() + timeout_s
    state.signal(signal.SIGTERM)
    if now:
        time.sleep(POLL_S)
        state.signal(signal.SIGTERM)
    while time.monotonic() < deadline:
        if not state.is_running() and state.is_empty():
            return True
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(POLL_S)
            continue
        # Ctrl-C during a graceful stop: do not wait for it any longer.
        state.signal(signal.SIGTERM)
    return False
