"""One queue for every trigger. A key waits in it at most once and is worked on by one worker at a time."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

Key = tuple[str, str]
"""Namespace and name of a service."""

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 15.0
MIN_GAP_S = 0.3
"""Between the end of a pass and the next of the same key: what happens meanwhile is one trigger."""


class WorkQueue:
    """Keys to work on. Event-loop thread only.

    A key that is added while it is worked on is worked on once more afterwards. A pass that fails is repeated with a
    growing pause.
    """

    def __init__(self, *, min_gap_s: float = MIN_GAP_S) -> None:
        self._min_gap_s = min_gap_s
        self._ready: deque[Key] = deque()
        self._queued: set[Key] = set()
        self._working: set[Key] = set()
        self._again: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._ended_s: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ready) + len(self._again)

    def add(self, key: Key) -> None:
        """Work on the key soon."""
        if key in self._working:
            self._again.add(key)
            return
        if key in self._queued or (key in self._failures and key in self._timers):
            return  # it waits already; after a failure nothing shortens its pause
        now_s = asyncio.get_running_loop().time()
        early_s = self._ended_s.get(key, -self._min_gap_s) + self._min_gap_s - now_s
        if early_s > 0:
            self.add_after(key, early_s)
            return
        self._cancel(key)
        self._queued.add(key)
        self._ready.append(key)
        self._wake.set()

    def add_after(self, key: Key, seconds: float) -> None:
        """Work on the key in a while, or earlier when something adds it earlier."""
        loop = asyncio.get_running_loop()
        when_s = loop.time() + seconds
        known = self._timers.get(key)
        if known is not None and known.when() <= when_s:
            return
        self._cancel(key)
        self._timers[key] = loop.call_at(when_s, self._due, key)

    def keep_only(self, keys: set[Key]) -> None:
        """Forget when others were worked on: they are gone for good."""
        for known in (self._ended_s, self._failures):
            for key in [key for key in known if key not in keys]:
                del known[key]

    async def work(self, handle: Callable[[Key], Awaitable[float | None]], *, workers: int) -> None:
        """Work on keys until cancelled. `handle` returns after how many seconds it wants the key again, or None."""
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._worker(handle))

    async def _worker(self, handle: Callable[[Key], Awaitable[float | None]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._ready:
                self._wake.clear()
                await self._wake.wait()
            key = self._ready.popleft()
            self._queued.discard(key)
            self._working.add(key)
            try:
                again_s = await handle(key)
                self._failures.pop(key, None)
            except Exception:
                again_s = self._backoff_s(key)
                log.exception("pass failed", extra={"service": "/".join(key), "again_s": again_s})
            finally:
                self._working.discard(key)
                self._ended_s[key] = loop.time()
            if again_s is not None:
                self.add_after(key, again_s)
            if key in self._again:
                self._again.discard(key)
                self.add(key)

    def _backoff_s(self, key: Key) -> float:
        count = self._failures[key] = self._failures.get(key, 0) + 1
        return min(FIRST_BACKOFF_S * 2.0 ** min(count - 1, 16), LONGEST_BACKOFF_S)

    def _due(self, key: Key) -> None:
        del self._timers[key]
        self._ended_s.pop(key, None)
        self.add(key)

    def _cancel(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
