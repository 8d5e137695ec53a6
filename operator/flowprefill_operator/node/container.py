"""One container as a process: started, probed, restarted with back-off, stopped with grace."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from flowprefill_operator.node import probe as probes
from flowprefill_operator.node.backoff import Backoff
from flowprefill_operator.node.launch import CannotRun, Launch
from flowprefill_operator.node.logs import BoundedLog, note
from flowprefill_operator.node.process import Exit, Process
from flowprefill_operator.node.template import Container, Probe

_log = logging.getLogger(__name__)

UNHEALTHY_GRACE_S = 10.0
"""How long a process that failed its liveness or startup probe may take to end after SIGTERM."""

CANNOT_RUN_RETRY_S = 5.0
"""How often it is looked whether what a container lacks is there now."""

Phase = Literal[
    "Waiting", "Starting", "Running", "CrashLoopBackOff", "Completed", "CannotRun", "Stopping", "Stopped"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerStatus:
    """What can be seen of a container. `message` says why it is not running or not ready; empty otherwise."""

    name: str
    phase: Phase = "Waiting"
    ready: bool = False
    restarts: int = 0
    pid: int | None = None
    message: str = ""


class ContainerRunner:
    """Runs one container until stopped, or once to success for an init container.

    `prepare` gives the command for the next start (ports may have changed since the last). `resolve` turns a
    container port into host and port here. `on_change` is called after each change of `status`. All on one loop.
    """

    def __init__(
        self,
        container: Container,
        *,
        prepare: Callable[[], Launch],
        resolve: probes.Resolve,
        cwd: Path,
        log_path: Path,
        on_change: Callable[[], None],
        backoff: Backoff,
        keep_open: Sequence[int] = (),
    ) -> None:
        self.container = container
        self.status = ContainerStatus(name=container.name)
        self.log_path = log_path
        self._prepare = prepare
        self._resolve = resolve
        self._cwd = cwd
        self._on_change = on_change
        self._backoff = backoff
        self._keep_open = keep_open
        self._process: Process | None = None
        self._stopping = asyncio.Event()
        self._log: BoundedLog | None = None

    async def run_to_success(self) -> bool:
        """Run as an init container: again after each failure, until it exits with 0. False when stopped before."""
        return await self._run(until_success=True)

    async def run(self) -> None:
        """Run as a main container: restarted whenever it ends, until `stop`."""
        await self._run(until_success=False)

    async def stop(self, *, grace_s: float, force: asyncio.Event) -> None:
        """preStop sleep, SIGTERM, and SIGKILL when `grace_s` (which includes the sleep) is over or `force` is set."""
        deadline = time.monotonic() + grace_s
        self._stopping.set()
        process = self._process
        if process is None:
            return
        self._set(phase="Stopping", ready=False, message="")
        if self.container.pre_stop_s:
            await _first_of(process.wait(), force.wait(), timeout_s=min(self.container.pre_stop_s, grace_s))
        process.terminate()
        await _first_of(process.wait(), force.wait(), timeout_s=max(deadline - time.monotonic(), 0.0))
        process.kill()
        await process.wait()

    async def _run(self, *, until_success: bool) -> bool:
        failures = 0
        self._log = BoundedLog(self.log_path)
        try:
            while not self._stopping.is_set():
                started_s = time.monotonic()
                ended = await self._run_once()
                if ended is None:
                    return False
                if self._stopping.is_set():
                    break
                if until_success and ended.code == 0:
                    self._set(phase="Completed", ready=True, pid=None, message="")
                    return True
                if time.monotonic() - started_s >= self._backoff.reset_after_s:
                    failures = 0
                failures += 1
                delay_s = self._backoff.delay_s(failures)
                message = f"{ended}; next start in {delay_s:g} s" if delay_s else str(ended)
                self._note(f"{ended}, restart {self.status.restarts + 1} in {delay_s:g} s")
                self._set(
                    phase="CrashLoopBackOff" if delay_s else "Waiting",
                    ready=False,
                    pid=None,
                    restarts=self.status.restarts + 1,
                    message=message,
                )
                if delay_s:
                    await _first_of(self._stopping.wait(), timeout_s=delay_s)
            return False
        finally:
            if self.status.phase != "Completed":
                self._set(phase="Stopped", ready=False, pid=None, message=self.status.message)
            self._log.close()

    async def _run_once(self) -> Exit | None:
        """Start the process and wait for its end; None when stopped before it could start."""
        assert self._log is not None
        command = await self._command()
        if command is None:
            return None
        process = await Process.start(
            command.argv, env=command.env, cwd=self._cwd, log=self._log.write, keep_open=self._keep_open
        )
        self._process = process
        if self._stopping.is_set():  # stop() came while the process was being made
            process.kill()
        self._set(phase="Starting", ready=False, pid=process.pid, message="")
        health = asyncio.create_task(self._watch_health(process))
        try:
            return await process.wait()
        finally:
            health.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await health
            if not process.ended:
                process.kill()
            self._process = None

    async def _command(self) -> Launch | None:
        """The command to start, once this machine can run it; None when stopped before that."""
        while not self._stopping.is_set():
            try:
                command = self._prepare()
                return dataclasses.replace(command, argv=_find(command.argv, command.env))
            except CannotRun as error:
                if self.status.message != str(error):
                    self._note(str(error))
                self._set(phase="CannotRun", ready=False, message=str(error))
            await _first_of(self._stopping.wait(), timeout_s=CANNOT_RUN_RETRY_S)
        return None

    async def _watch_health(self, process: Process) -> None:
        """Startup probe first; then readiness and liveness side by side, as a kubelet runs them."""
        container = self.container
        async with probes.client() as http:
            if container.startup_probe is not None:
                await asyncio.sleep(container.startup_probe.initial_delay_seconds)
                if not await self._settled(container.startup_probe, http, state=None):
                    await self._end(process, "startup probe failed", container.startup_probe)
                    return
            self._set(phase="Running", ready=container.readiness_probe is None, message="")
            async with asyncio.TaskGroup() as group:
                if container.readiness_probe is not None:
                    group.create_task(self._watch_readiness(container.readiness_probe, http))
                if container.liveness_probe is not None:
                    group.create_task(self._watch_liveness(container.liveness_probe, http, process))

    async def _watch_readiness(self, probe: Probe, http: httpx.AsyncClient) -> None:
        await asyncio.sleep(probe.initial_delay_seconds)
        ready: bool | None = None
        while True:
            ready = await self._settled(probe, http, state=ready)
            if not self._stopping.is_set():
                self._set(ready=ready, message="" if ready else self.status.message)

    async def _watch_liveness(self, probe: Probe, http: httpx.AsyncClient, process: Process) -> None:
        await asyncio.sleep(probe.initial_delay_seconds)
        live: bool | None = None
        while live is not False:
            live = await self._settled(probe, http, state=live)
        await self._end(process, "liveness probe failed", probe)

    async def _settled(self, probe: Probe, http: httpx.AsyncClient, *, state: bool | None) -> bool:
        def on_failure(problem: str) -> None:
            if not self._stopping.is_set() and self.status.message != problem:
                self._set(message=problem)

        return await probes.until_settled(probe, self._resolve, http, state=state, on_failure=on_failure)

    async def _end(self, process: Process, why: str, probe: Probe) -> None:
        """Restart an unhealthy process: SIGTERM, then SIGKILL after the container's usual patience."""
        if self._stopping.is_set():
            return
        self._note(f"{why} ({self.status.message}, {probe.failure_threshold} times in a row): restarting")
        _log.warning("container restarts", extra={"container": self.container.name, "reason": why})
        self._set(ready=False, message=why)
        process.terminate()
        await _first_of(process.wait(), timeout_s=UNHEALTHY_GRACE_S)
        process.kill()

    def _note(self, words: str) -> None:
        assert self._log is not None
        self._log.write(note(words).encode() + b"\n")

    # The keywords are fields of ContainerStatus, which checks their names.
    def _set(self, **changes: Any) -> None:
        before = self.status
        self.status = dataclasses.replace(before, **changes)
        if self.status != before:
            self._on_change()


def _find(argv: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """`argv` with its executable's full path. Raises CannotRun when it is not on this machine."""
    found = shutil.which(argv[0], path=env.get("PATH"))
    if found is None:
        raise CannotRun(f"no executable {argv[0]!r} on this machine (looked on PATH)")
    return (found, *argv[1:])


async def _first_of(*waits: Coroutine[object, object, object], timeout_s: float) -> None:
    """Return when one of the awaitables is done or the time is over; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
