"""The phases of a server's life, proxy or pod, and what each means to a client.

    starting ─▶ ready ─▶ lame_duck ─▶ draining ─▶ stopped

`/ready` is 200 in `ready` alone. A lame duck still answers, with `Connection: close`, until load balancers have
noticed; then nothing new is accepted and running requests end. A second signal skips what is left of a wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any, Literal

log = logging.getLogger(__name__)

Phase = Literal["starting", "ready", "lame_duck", "draining", "stopped"]


class Lifecycle:
    """One server's phase and its requests in flight. Event-loop thread only."""

    def __init__(self, kind: Literal["pod", "proxy"]) -> None:
        self._kind = kind
        self._on_change: Callable[[], None] = lambda: None
        self._phase: Phase = "starting"
        self._failure: str | None = None
        self._probe: Callable[[], str | None] = lambda: None
        self._in_flight = 0
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    def subscribe(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` after every change."""
        self._on_change = on_change

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def ready(self) -> bool:
        return self._phase == "ready" and self.failure is None

    @property
    def failure(self) -> str | None:
        """Why the server cannot work any more; None while it can."""
        return self._failure or self._probe()

    def probe(self, failure: Callable[[], str | None]) -> None:
        """Ask `failure` as well, from now on."""
        self._probe = failure

    @property
    def closes_connections(self) -> bool:
        """Whether answers say `Connection: close`."""
        return self._phase in ("lame_duck", "draining", "stopped")

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def enter(self, phase: Phase) -> None:
        """Go on to `phase`."""
        self._phase = phase
        log.info("%s phase", self._kind, extra={"phase": phase, "in_flight": self._in_flight})
        self._on_change()

    def fail(self, reason: str) -> None:
        """The server is broken for good: not ready, not live."""
        self._failure = reason
        self._on_change()

    def request_began(self) -> None:
        self._in_flight += 1

    def request_ended(self) -> None:
        self._in_flight -= 1

    def stop(self) -> None:
        """Begin to stop; called again, hurry."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def stop_asked(self) -> None:
        """Return once `stop` was called."""
        await self._stop.wait()

    def hurry_asked(self) -> asyncio.Future[None]:
        """Done once `stop` was called a second time."""
        return asyncio.ensure_future(self._wait_hurry())

    async def _wait_hurry(self) -> None:
        await self._hurry.wait()

    async def pause(self, seconds: float) -> None:
        """Wait, but not after `stop` was called a second time."""
        try:
            async with asyncio.timeout(seconds):
                await self._hurry.wait()
        except TimeoutError:
            return

    async def until(self, done: asyncio.Future[Any], seconds: float) -> bool:
        """Wait for `done`, at most `seconds` and not after a second `stop`. Whether it is done."""
        hurry = asyncio.ensure_future(self._hurry.wait())
        waited: set[asyncio.Future[Any]] = {done, hurry}  # Any: results of two types, neither looked at
        try:
            await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurry.cancel()
        return done.done()


@contextlib.contextmanager
def stopped_by_signals(lifecycle: Lifecycle) -> Iterator[None]:
    """SIGTERM and SIGINT begin the stop; a second one hurries it. Inside the running event loop."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, lifecycle.stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
