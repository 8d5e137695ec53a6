"""One command as a process group that never outlives this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SHIM = Path(__file__).with_name("shim.py")
ORPHAN_GRACE_S = 5.0
"""How long a command may take to stop after the supervisor itself died."""
READ_BYTES = 65_536
LAST_OUTPUT_S = 1.0
"""How long to wait for the rest of the output after the end."""


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

    def __init__(
        self,
        shim: asyncio.subprocess.Process,
        pid: int,
        output: asyncio.StreamReader,
        pipe: asyncio.BaseTransport,
        log: Callable[[bytes], None],
    ) -> None:
        self._shim = shim
        self._pipe = pipe
        self.pid = pid
        """Process id of the command, the leader of its group."""
        self._copying = asyncio.create_task(_copy(output, log))
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
        # A pipe of our own: asyncio's would hold back the exit until every holder of the other end is gone.
        read_end, write_end = os.pipe()
        output = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(read_end, "rb", buffering=0)
        )
        try:
            shim = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                str(SHIM),
                str(ORPHAN_GRACE_S),
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=write_end,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(env),
                cwd=cwd,
                pass_fds=tuple(keep_open),
                start_new_session=True,
            )
        except OSError:
            pipe.close()
            raise
        finally:
            os.close(write_end)
        first = (await output.readline()).strip()
        return cls(shim, int(first) if first.isdigit() else shim.pid, output, pipe, log)

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

    async def _wait(self) -> Exit:
        code = await self._shim.wait()
        # What left the command's group may hold the pipe still; its output is not waited for.
        done, _ = await asyncio.wait({self._copying}, timeout=LAST_OUTPUT_S)
        if not done:
            self._copying.cancel()
        self._pipe.close()
        assert self._shim.stdin is not None
        self._shim.stdin.close()
        return Exit(code=code)


async def _copy(output: asyncio.StreamReader, log: Callable[[bytes], None]) -> None:
    while chunk := await output.read(READ_BYTES):
        log(chunk)
