"""The child's life as its pod sees it: until it serves, while it serves, until nobody needs it any more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

from flowprefill.server.frame import PodFrame
from flowprefill.server.vllm.child import Child
from flowprefill.server.vllm.observer import Observer
from flowprefill.server.vllm.probing import ApiServer

log = logging.getLogger(__name__)

START_LOOK_S = 0.5
LOOK_S = 5.0
"""How often the child is asked whether it is well and what it does, once it serves."""
UNWELL_S = 60.0
"""A child that answers nothing for so long is given up."""
SILENT_S = 60.0
"""When to say that vLLM serves but its engine core has not told of itself."""
SHOWN_S = 5.0
"""How long `/health` tells of a failure before the pod ends: probes and people see why."""
DRAIN_LOOK_S = 0.2


class ChildFailed(Exception):
    """The child died or answers no more; the words are for people."""


class Watch:
    """Watches one child. Its methods are called in their order."""

    def __init__(self, frame: PodFrame, observer: Observer, child: Child, api: ApiServer) -> None:
        self._frame = frame
        self._lifecycle = frame.lifecycle
        self._observer = observer
        self._child = child
        self._api = api

    async def until_ready(self) -> bool:
        """Wait until the pod can serve (True) or a stop is asked for. Raises `ChildFailed`."""
        serves_since_s: float | None = None
        while not await self._stopped_within(START_LOOK_S):
            if not await self._api.healthy():
                continue
            if self._frame.role == "decode" or self._observer.started:
                self._lifecycle.enter("ready")
                return True
            now_s = time.monotonic()
            if serves_since_s is None:
                serves_since_s = now_s
            elif now_s - serves_since_s > SILENT_S:
                serves_since_s = now_s
                log.warning("vLLM serves, but its engine core has not told of itself: is our plugin loaded?")
        return False

    async def until_stop(self) -> bool:
        """Follow its load until a stop is asked for (True). Raises `ChildFailed`."""
        well_s = time.monotonic()
        while not await self._stopped_within(LOOK_S):
            if await self._api.healthy():
                well_s = time.monotonic()
                await self._look()
            elif time.monotonic() - well_s > UNWELL_S:
                raise ChildFailed(f"vllm serve has not answered /health for {UNWELL_S:.0f} s")
        return True

    async def drain(self) -> float:
        """Lame duck, then until nobody needs the child; seconds that are left of the drain time. Raises `ChildFailed`."""
        termination = self._frame.config.termination
        self._lifecycle.enter("lame_duck")
        await self._lifecycle.pause(termination.lame_duck_seconds)
        self._lifecycle.enter("draining")
        began_s = time.monotonic()
        drained = asyncio.ensure_future(self._drained())
        if await self._lifecycle.until(drained, termination.drain_seconds):
            drained.result()
        else:
            log.warning("stopping before all work was done", extra={"role": self._frame.role})
            drained.cancel()
        return max(began_s + termination.drain_seconds - time.monotonic(), 0.0)

    async def show(self, failure: str) -> None:
        """The pod is broken: say so, for a while."""
        log.critical("the pod cannot serve", extra={"role": self._frame.role, "reason": failure})
        self._lifecycle.fail(failure)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHOWN_S):
                await self._lifecycle.stop_asked()

    async def _drained(self) -> None:
        """Return once the child has no request, twice in a row, and a prefill pod holds no KV that others want."""
        calm = 0
        while calm < 2:
            self._check()
            wanted = self._frame.role == "prefill" and self._observer.holds_kv
            nothing = self._observer.idle or (not wanted and await self._look() == 0)
            calm = calm + 1 if nothing else 0
            await asyncio.sleep(DRAIN_LOOK_S)

    async def _look(self) -> int | None:
        """Hear of the child's load; the requests that it has, None when it does not say."""
        load = await self._api.load()
        if load is None:
            return None
        self._observer.loaded(load)
        return load.in_flight

    async def _stopped_within(self, seconds: float) -> bool:
        """Wait that long, not beyond a stop or the child's end; whether a stop was asked for. Raises `ChildFailed`."""
        stop = asyncio.ensure_future(self._lifecycle.stop_asked())
        try:
            either: set[asyncio.Future[Any]] = {stop, self._child.ended}  # Any: results that nobody looks at
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                return True
        finally:
            stop.cancel()
        self._check()
        return False

    def _check(self) -> None:
        if self._child.death is not None:
            raise ChildFailed(self._child.death)
