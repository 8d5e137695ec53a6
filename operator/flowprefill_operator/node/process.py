"""One command as a process group that never outlives this process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SHIM = Path(__file__).with_name("shim.py")
ORPHAN_GRACE_S = 5.0
"""How long a command may take to stop after the supervisor itself died."""
READ_BYTES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process ended: `code` as its shell would show it (128 + signal number for a signal)."""

    code: int

    def __str__(self) -> str:
        if self.code > 128:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(self.code - 128).name}"
        return f"exited with code {self.code}"


class Process:
    """A running command; made by `start`. All methods run on the event loop that started it."""

    def __init__(self, shim: asyncio.subprocess.Process, pid: int, log: Callable[[bytes], None]) -> None:
        self._shim = shim
        self.pid = pid
        """Process id of the command, the leader of its group."""
        self._output = asyncio.create_task(self._copy_output(log))
        self._exit = asyncio.create_task(self._wait())

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        log: Callable[[bytes], None],
        keep_open: Sequence[int] = (),
    ) -> Process:
        """Start `argv` in `cwd`; `log` gets what it writes to stdout and stderr, in order.

        The descriptors in `keep_open` stay open in the shim (not in the command) until the command has ended: a
        lock behind them is held as long as anything of it runs.
        """
        shim = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            str(SHIM),
            str(ORPHAN_GRACE_S),
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            pass_fds=tuple(keep_open),
            start_new_session=True,
        )
        assert shim.stdout is not None
        first = (await shim.stdout.readline()).strip()
        return cls(shim, int(first) if first.isdigit() else shim.pid, log)

    @property
    def ended(self) -> bool:
        """Whether the command has ended."""
        return self._shim.returncode is not None

    def terminate(self) -> None:
        """Send SIGTERM to the command alone, as Kubernetes does to a container's first process."""
        self._command(b"T")

    def kill(self) -> None:
        """Send SIGKILL to the command and everything in its group."""
        self._command(b"K")

    async def wait(self) -> Exit:
        """Return when the command has ended and its output is in the log; may be awaited by many."""
        return await asyncio.shield(self._exit)

    def _command(self, command: bytes) -> None:
        assert self._shim.stdin is not None
        if self._shim.returncode is None:
            with contextlib.suppress(OSError, RuntimeError):
                self._shim.stdin.write(command)

    async def _copy_output(self, log: Callable[[bytes], None]) -> None:
        assert self._shim.stdout is not None
        while chunk := await self._shim.stdout.read(READ_BYTES):
            log(chunk)

    async def _wait(self) -> Exit:
        code = await self._shim.wait()
        # A grandchild that left the group may hold the pipe; its output is not waited for.
        done, _ = await asyncio.wait({self._output}, timeout=1.0)
        if not done:
            self._output.cancel()
        assert self._shim.stdin is not None
        self._shim.stdin.close()
        return Exit(code=code)
