"""The child process of a pod: started in a process group of its own, watched, ended with all that it started.

What it writes goes where the pod's own log goes. A keeper between the two (`keeper`) sees to it that nothing of it stays
when the pod is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence

log = logging.getLogger(__name__)

KEEPER = "flowprefill.server.vllm.keeper"


class Child:
    """A running program. Event-loop thread only."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process = process
        self._name = name
        self.ended: asyncio.Future[int] = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(cls, command: Sequence[str], variables: Mapping[str, str], *, name: str) -> Child:
        """Start `command`, which `name` stands for in messages."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", KEEPER, *command),
            env=dict(variables),
            stdin=asyncio.subprocess.PIPE,
            process_group=0,
        )
        log.info("child started", extra={"pid": process.pid, "child": name})
        return cls(process, name)

    @property
    def pid(self) -> int:
        """Process id of the keeper, and of the whole group."""
        return self._process.pid

    @property
    def death(self) -> str | None:
        """How it ended, for people; None while it runs."""
        if not self.ended.done():
            return None
        code = self.ended.result()
        if code > 128:
            with contextlib.suppress(ValueError):
                return f"{self._name} was ended by {signal.Signals(code - 128).name}; its log says more"
        return f"{self._name} ended with exit code {code}; its log says why"

    def terminate(self) -> None:
        """Ask it to stop."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    async def stop(self, patience_s: float, *, hurry: asyncio.Future[None] | None = None) -> bool:
        """Ask it to stop, wait that long or until `hurry`, then kill what is left of the group. Whether it went by itself."""
        went = self.ended.done()
        if not went:
            self.terminate()
            waited: set[asyncio.Future[int] | asyncio.Future[None]] = {self.ended}
            if hurry is not None:
                waited.add(hurry)
            await asyncio.wait(waited, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            went = self.ended.done()
            if not went:
                log.warning("child killed", extra={"pid": self.pid, "child": self._name})
        # Engine cores and workers of an API server that died otherwise stay.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        await self.ended
        if self._process.stdin is not None:
            self._process.stdin.close()
        return went
