"""Supervising a service in this process, until it is stopped."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from flowprefill_operator.node.logs import prune
from flowprefill_operator.node.pod import Machine
from flowprefill_operator.node.state import (
    NodeStatus,
    Options,
    StateDir,
    default_cache,
    default_claims,
)
from flowprefill_operator.node.supervisor import CannotStart, Supervisor
from flowprefill_operator.plan import plan
from flowprefill_operator.settings import LocalPlaces, PlanSettings

KEPT_LOGS = 40
"""Logs of earlier pods that a start leaves in place."""
LEFTOVERS_S = 20.0
"""How long to wait for the processes of a supervisor that was killed; their shims stop them within seconds."""


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
        prune(state.logs, keep=KEPT_LOGS)
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
