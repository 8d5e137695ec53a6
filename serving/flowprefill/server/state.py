"""The pod's state as lines: one at every change, one at least every two seconds, to every subscriber."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import count

from flowprefill.wire import PodState

HEARTBEAT_S = 2.0
MIN_INTERVAL_S = 0.005
"""Changes closer together than this share a line: what counts is the latest state."""


class StateHub:
    """Wakes subscribers on `changed`; each then builds the state of that moment, so that none lags behind."""

    def __init__(self, build: Callable[[int], PodState], *, heartbeat_s: float = HEARTBEAT_S) -> None:
        """`build(sequence)` returns the state now."""
        self._build = build
        self._heartbeat_s = heartbeat_s
        self._version = 0
        self._changed = asyncio.Event()
        self._closed = False
        self._sequence = count(1)

    def build_by(self, build: Callable[[int], PodState]) -> None:
        """Build states by `build` from now on."""
        self._build = build
        self.changed()

    def changed(self) -> None:
        """Something changed. Event-loop thread only."""
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """End every stream."""
        self._closed = True
        self.changed()

    def now(self) -> PodState:
        """The state of this moment, with its own sequence number."""
        return self._build(next(self._sequence))

    async def lines(self) -> AsyncIterator[bytes]:
        """Newline-delimited JSON until `close`."""
        while not self._closed:
            version, changed = self._version, self._changed
            yield self.now().model_dump_json(exclude_none=True).encode() + b"\n"
            if self._version != version:
                await asyncio.sleep(MIN_INTERVAL_S)
                continue
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await changed.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(MIN_INTERVAL_S)
