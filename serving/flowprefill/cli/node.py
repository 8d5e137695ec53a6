"""The commands that run services on this machine. `flowprefill_operator.node` does the work."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowprefill.cli.problems import BAD_INPUT, fail, guarded
from flowprefill.cli.services import (
    Name,
    StateRoot,
    find_services,
    made,
    names_of,
    read_service,
    state_of,
    supervisor_argv,
    text_of,
)

if TYPE_CHECKING:
    from flowprefill_crd import FlowPrefillService
    from flowprefill_operator.node.state import StateDir

DEFAULT_TIMEOUT_S = 600.0


def up(
    file: Annotated[
        Path, typer.Option("--file", "-f", help="YAML file with one FlowPrefillService; - is standard input.")
    ],
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Leave it running; `flowprefill down` stops it.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65_535,
            help="Port of the API; 0 takes any free one. When left out: the service's own, or the next free one.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address of the API. Pods themselves stay on 127.0.0.1.")
    ] = "127.0.0.1",
    files: Annotated[
        Path | None,
        typer.Option(
            help="Folder with a folder of files for each Secret and ConfigMap that the service names.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    wait: Annotated[bool, typer.Option(help="With --detach: return only when the service is ready.")] = True,
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait until a detached or changed service is ready.")
    ] = DEFAULT_TIMEOUT_S,
    state_dir: StateRoot = None,
) -> None:
    """Run a service on this machine, or change one that runs.

    Plans the same pods as the operator and runs each as a process: proxy, prefill and decode, with probes,
    restarts and graceful stop. For a service that runs already, the file is taken over: a live change (SLO classes,
    policy) at once, any other by starting new pods and stopping the old ones when the new are ready.

    Examples:

        flowprefill up -f quickstart.yaml

        flowprefill up -f quickstart.yaml --detach --port 8080
    """
    with guarded():
        from flowprefill_operator.node.check import check
        from flowprefill_operator.node.control import NotInUse, is_stopping, start, write_service
        from flowprefill_operator.node.state import Options

        service = read_service(file)
        state = made(state_of(state_dir, service.metadata.namespace, service.metadata.name))
        text = text_of(service)
        deadline = time.monotonic() + timeout
        if is_stopping(state):
            _wait_for_end(state, timeout_s=timeout)
        running = state.is_running()
        check(service, state.read_options().files if running else files, source=str(file), running=running)
        fetch_model(service)
        if running:
            if port is not None or files is not None:
                fail(
                    f"{state.name} runs; its port and files stay until `flowprefill down {state.name}`: "
                    f"leave --port and --files out to change the service",
                    code=BAD_INPUT,
                )
            _change(state, text, timeout_s=timeout)
            return
        options = Options(host=host, port=port, files=None if files is None else files.resolve())
        if not detach:
            write_service(state, text)
            state.write_options(options)
            _run_here(state)
            return
        from flowprefill.cli.narrator import Narrator

        narrator = Narrator(foreground=False)
        try:
            start(
                state,
                text,
                options,
                supervisor_argv(state),
                timeout_s=max(deadline - time.monotonic(), 0.0),
                on_status=narrator.tell,
                wait=wait,
            )
        except NotInUse as error:
            fail(f"{error}; see `flowprefill status {state.name}` and `flowprefill logs supervisor`")


def supervise(
    root: Path,
    namespace: str,
    name: str,
    bound: Annotated[bool, typer.Option(help="Stop when standard input ends.")] = False,
) -> None:
    """Run a service that `up --detach` has prepared; logs to standard error."""
    with guarded():
        from flowprefill.logs import configure_logging
        from flowprefill_operator.node.run import supervise as run
        from flowprefill_operator.node.supervisor import CannotStart

        configure_logging("json")
        if bound:
            threading.Thread(target=_stop_with_input, daemon=True).start()
        try:
            run(state_of(root, namespace, name))
        except CannotStart as error:
            fail(str(error))


def _stop_with_input() -> None:
    """Ask this process to stop once whoever holds the other end of its standard input is gone."""
    sys.stdin.buffer.read()
    logging.getLogger(__name__).info("standard input ended: who started this service is gone")
    os.kill(os.getpid(), signal.SIGTERM)


def down(
    name: Name = None,
    everything: Annotated[bool, typer.Option("--all", help="Stop every service.")] = False,
    now: Annotated[bool, typer.Option("--now", help="Kill the pods; running requests are lost.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for the end.")] = DEFAULT_TIMEOUT_S,
    state_dir: StateRoot = None,
) -> None:
    """Stop a service that `up` started. Its logs stay.

    Pods finish running requests first, for as long as the service's termination allows.

    Examples:

        flowprefill down

        flowprefill down quickstart --now
    """
    with guarded():
        from flowprefill_operator.node.control import stop

        found = find_services(state_dir, None if everything else name, running=True)
        if not found:
            print("nothing runs")
            return
        if name is None and not everything and len(found) > 1:
            fail(f"several services run ({names_of(found)}); name one, or use --all", code=BAD_INPUT)
        for state in found:
            print(f"stopping {state.name} ...", flush=True)
            if not stop(state, timeout_s=timeout, now=now):
                fail(
                    f"{state.name} still runs after {timeout:g} s; `flowprefill down {state.name} --now` kills it"
                )
            print(f"{state.name} has stopped")


def status(
    name: Name = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one JSON document.")] = False,
    state_dir: StateRoot = None,
) -> None:
    """Show what runs here: pods, restarts, ports, SLO attainment per class, KV cache, and why something is not ready.

    Exits with 0 when every service shown is ready, with 1 otherwise.

    Example: flowprefill status quickstart --json
    """
    with guarded():
        import json

        from flowprefill.cli.screen import show
        from flowprefill_operator.node.insight import look

        found = find_services(state_dir, name, running=False)
        if name is None:
            found = [state for state in found if state.is_running()]
        views = [look(state) for state in found]
        if as_json:
            print(json.dumps({"services": [view.as_json() for view in views]}, indent=2))
        elif not views:
            print("no service runs here; start one with `flowprefill up -f FILE`")
            if stopped := find_services(state_dir, None, running=False):
                print(f"stopped, with logs kept: {names_of(stopped)}")
        else:
            show(views)
        raise typer.Exit(0 if all(view.running and view.status.ready for view in views) else 1)


def fetch_model(service: FlowPrefillService) -> None:
    """Fetch an embedded model before pods need it, with progress in sight; both would fetch it silently."""
    if service.spec.engine.type != "torch" or service.spec.model.scheme != "embedded":
        return
    from flowprefill.cli.progress import ProgressBar
    from flowprefill.engines.models import resolve_model

    with ProgressBar("fetching the model") as bar:
        resolve_model(service.spec.model.uri, progress=bar.update)


def _run_here(state: StateDir) -> None:
    from flowprefill.cli.narrator import Narrator
    from flowprefill.logs import configure_logging
    from flowprefill_operator.node.run import supervise as run
    from flowprefill_operator.node.supervisor import CannotStart

    narrator = Narrator(foreground=True)
    with state.supervisor_log.open("a") as log:
        configure_logging("json", stream=log)
        try:
            run(state, on_status=narrator.tell)
        except CannotStart as error:
            fail(str(error))
    print("stopped; nothing is left running")


def _wait_for_end(state: StateDir, *, timeout_s: float) -> None:
    """Wait for a service that is being stopped, so that it can start afresh."""
    from flowprefill_operator.node.control import wait_for_end

    print(f"{state.name} is stopping; waiting for its end", flush=True)
    if not wait_for_end(state, timeout_s=timeout_s):
        fail(
            f"{state.name} is still stopping after {timeout_s:g} s; `flowprefill down {state.name} --now` kills it"
        )


def _change(state: StateDir, text: str, *, timeout_s: float) -> None:
    """Hand a changed service to its running supervisor and wait until it is in use."""
    from flowprefill.cli.narrator import Narrator
    from flowprefill_operator.node.control import NotInUse, Refused, change, is_applied

    if is_applied(state, text):
        print(f"{state.name} runs like that already")
        return
    narrator = Narrator(foreground=False)
    narrator.skip(state.read_status())
    try:
        status = change(state, text, timeout_s=timeout_s, on_status=narrator.tell)
    except Refused as error:
        fail(str(error), code=BAD_INPUT)
    except NotInUse as error:
        fail(f"{error}; see `flowprefill status {state.name}`")
    if status.paused:
        print(f"{state.name} is paused: nothing was changed")
        return
    print(f"{state.name} follows generation {status.generation}, revision {status.revision}")
