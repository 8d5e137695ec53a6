"""The proxy's phases: ready, lame duck, draining. Counts requests in flight.

On the first stop signal the proxy is a lame duck: `/ready` says no, new requests are still served, every answer says
`Connection: close`. After that it drains: no new connections, what is in flight ends. A second signal hurries.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

log = logging.getLogger(__name__)

Phase = Literal["starting", "ready", "lame_duck", "draining", "stopped"]


class Lifecycle:
    """One proxy's phase and its requests in flight. Event loop only."""

    def __init__(self) -> None:
        self.phase: Phase = "starting"
        self.num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    @property
    def ready(self) -> bool:
        return self.phase == "ready"

    @property
    def closes_connections(self) -> bool:
        return self.phase not in ("starting", "ready")

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        log.info("proxy phase", extra={"phase": phase, "in_flight": self.num_in_flight})

    def request_began(self) -> None:
        self.num_in_flight += 1
        self._idle.clear()

    def request_ended(self) -> None:
        self.num_in_flight -= 1
        if not self.num_in_flight:
            self._idle.set()

    def stop(self) -> None:
        """Begin to stop; called again, hurry."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def stop_asked(self) -> None:
        await self._stop.wait()

    async def pause(self, seconds: float) -> None:
        """Wait, unless hurried."""
        await self._any(seconds, self._hurry)

    async def idle(self, seconds: float) -> bool:
        """Wait until nothing is in flight, at most `seconds` and unless hurried. Whether nothing is."""
        await self._any(seconds, self._hurry, self._idle)
        return not self.num_in_flight

    @staticmethod
    async def _any(seconds: float, *events: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
