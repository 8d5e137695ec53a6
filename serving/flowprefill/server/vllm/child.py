"""The child process of a pod: started, watched, ended with all that it started.

What it writes goes where the pod's own log goes. A keeper between the two (`keeper`) sees to it that nothing of it stays
when the pod is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

KEEPER = "flowprefill.server.vllm.keeper"


class Child:
    """A running program. Event-loop thread only."""

    def __init__(self, keeper: asyncio.subprocess.Process, name: str) -> None:
        self._keeper = keeper
        self._name = name
        self.ended: asyncio.Future[int] = asyncio.ensure_future(keeper.wait())

    @classmethod
    async def start(
        cls, command: Sequence[str], variables: Mapping[str, str], *, name: str, folder: Path
    ) -> Child:
        """Start `command`, which `name` stands for in messages. `folder` is removed when this process is killed."""
        keeper = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", KEEPER, str(folder), *command),
            env=dict(variables),
            stdin=asyncio.subprocess.PIPE,
            process_group=0,
        )
        log.info("child started", extra={"pid": keeper.pid, "child": name})
        return cls(keeper, name)

    @property
    def pid(self) -> int:
        """Process id of the keeper."""
        return self._keeper.pid

    @property
    def death(self) -> str | None:
        """How it ended, for people; None while it runs."""
        if not self.ended.done():
            return None
        code = self.ended.result()
        number = -code if code < 0 else code - 128
        with contextlib.suppress(ValueError):
            return f"{self._name} was ended by {signal.Signals(number).name}; its log says more"
        return f"{self._name} ended with exit code {code}; its log says why"

    async def stop(self, patience_s: float, *, hurry: asyncio.Future[None]) -> bool:
        """Ask it to stop, wait that long or until `hurry`, then kill it and all that it started. Whether it went by itself."""
        self._signal(signal.SIGTERM)
        either: set[asyncio.Future[Any]] = {self.ended, hurry}  # Any: results of two types, neither looked at
        await asyncio.wait(either, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        went = self.ended.done()
        if not went:
            log.warning("child killed", extra={"pid": self.pid, "child": self._name})
            self._signal(signal.SIGUSR1)
        await self.ended
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()
        return went

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._keeper.send_signal(number)
