"""Starting, changing and stopping a service's supervisor from another process.

Both sides meet in the state folder: a change is a new `service.yaml` and SIGUSR1, a stop is SIGTERM, and what came of
it stands in `status.json`.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

import httpx

from flowprefill_operator.node.insight import generation_of
from flowprefill_operator.node.logs import last_lines
from flowprefill_operator.node.state import NodeStatus, Options, StateDir, write_atomically

POLL_S = 0.1

OnStatus = Callable[[NodeStatus], None]


class NotInUse(Exception):
    """What was asked for did not come to be; the message says why and what runs now."""


class Refused(NotInUse):
    """The supervisor did not take the change; the service stays as it was."""


def start(
    state: StateDir,
    text: str,
    options: Options,
    argv: Sequence[str],
    *,
    timeout_s: float,
    on_status: OnStatus,
    wait: bool = True,
    bound: bool = False,
) -> subprocess.Popen[bytes]:
    """Start `argv`, a command that supervises `state`, and wait until the service `text` is ready in all its pods.

    It lives on when this process and its terminal go; with `bound` its standard input is a pipe from this process,
    whose end tells it to stop. Without `wait` only its first words are waited for. Raises NotInUse.
    """
    write_service(state, text)
    state.write_options(options)
    with state.supervisor_log.open("ab") as log:
        supervisor = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE if bound else subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        for status in follow(state, timeout_s=left_s):
            if status.pid != supervisor.pid:
                continue  # of an earlier run
            on_status(status)
            if status.ready or (not wait and status.applied):
                return supervisor
        if supervisor.poll() is not None:
            reason = "".join(last_lines(state.supervisor_log, 1)).removeprefix("flowprefill: ")
            raise NotInUse(reason or f"the supervisor ended with {supervisor.returncode}")
        time.sleep(POLL_S)
    raise NotInUse(f"{state.name} is not ready after {timeout_s:g} s, but still running")


def change(state: StateDir, text: str, *, timeout_s: float, on_status: OnStatus) -> NodeStatus:
    """Hand a running supervisor the service `text`, and wait until all pods are ready and follow it.

    A paused service is only taken note of: nothing is waited for.
    Raises Refused when it is not taken, NotInUse when that takes too long or the supervisor ends first.
    """
    deadline = time.monotonic() + timeout_s
    digest = write_service(state, text)
    state.signal(signal.SIGUSR1)
    for status in follow(state, timeout_s=timeout_s):
        if status.error_digest == digest:
            raise Refused(f"change refused, the service stays as it was: {status.error}")
        if status.stopping:
            break
        if status.applied != digest:
            continue
        if status.paused:
            return status
        on_status(status)
        if status.ready and _followed(state, status, deadline):
            return status
    if is_stopping(state) or not state.is_running():
        raise NotInUse(f"{state.name} was stopped meanwhile")
    raise NotInUse(f"the change is not in full use after {timeout_s:g} s")


def is_stopping(state: StateDir) -> bool:
    """Whether a supervisor still runs, but only to end its pods: it takes no change any more."""
    status = state.read_status()
    return status is not None and status.stopping and state.is_running()


def wait_for_end(state: StateDir, *, timeout_s: float) -> bool:
    """Wait until the supervisor is gone; False when it still runs after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while state.is_running():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def stop(state: StateDir, *, timeout_s: float, now: bool = False) -> bool:
    """Stop the service and wait until nothing of it is left; False when something still is.

    `now` kills the pods without grace, and so does Ctrl-C while waiting.
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
        state.signal(signal.SIGTERM)
    return False


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


def write_service(state: StateDir, text: str) -> str:
    """Put the service's document in place; the digest by which the supervisor reports that it is in use."""
    write_atomically(state.service, text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_applied(state: StateDir, text: str) -> bool:
    """Whether the running service is exactly `text`, ready and not paused."""
    status = state.read_status()
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return status is not None and status.ready and not status.paused and status.applied == digest


def _followed(state: StateDir, status: NodeStatus, deadline: float) -> bool:
    """Wait until every pod says that it follows the status's generation.

    False when the time is over or the service is stopped first.
    """
    with httpx.Client(timeout=1.0, trust_env=False) as http:
        waiting = list(status.pods)
        while True:
            waiting = [pod for pod in waiting if generation_of(http, pod) < status.generation]
            if not waiting:
                return True
            if time.monotonic() >= deadline or is_stopping(state) or not state.is_running():
                return False
            time.sleep(POLL_S)
