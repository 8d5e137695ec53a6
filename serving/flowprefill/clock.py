"""The clock seam. Decisions never read a clock: drivers do, and pass `now_s` in with events.

Threads that wait do it through a `Timekeeper`, so that the same threads run on the machine's clock in a pod and
on a virtual one in tests (`flowprefill.execution.virtual_clock`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Monotonic time in seconds, from an arbitrary origin."""

    def now_s(self) -> float:
        """Seconds since this clock's origin."""
        ...


class Signal(Protocol):
    """A wake-up for one waiting thread. It says "look again", never what has changed.

    A `set` without a waiter is kept for the next `wait`; several are one. The state that the waiter looks at
    is written before `set` is called and read after `wait` returns.
    """

    def set(self) -> None:
        """Wake the waiter. Callable from any thread."""
        ...

    def wait(self, until_s: float | None = None) -> bool:
        """Wait for `set`, at the latest until `until_s` on the clock. True if it was set; unset afterwards."""
        ...


class Timekeeper(Clock, Protocol):
    """A clock that threads can wait on."""

    def sleep_until_s(self, when_s: float) -> None:
        """Wait until the clock shows `when_s`; return at once when it already does."""
        ...

    def signal(self) -> Signal:
        """A new signal whose time-outs count on this clock."""
        ...

    def start_thread(self, target: Callable[[], None], *, name: str, rank: int = 0) -> threading.Thread:
        """Start a daemon thread that may wait on this clock; the caller joins it.

        When the time-outs of several threads fall on the same instant, a virtual clock wakes them by
        ascending `rank`, then in the order in which they began to wait. A real clock ignores it.
        """
        ...


class _RealSignal:
    def __init__(self, clock: MonotonicClock) -> None:
        self._clock = clock
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def wait(self, until_s: float | None = None) -> bool:
        timeout = None if until_s is None else max(until_s - self._clock.now_s(), 0.0)
        was_set = self._event.wait(timeout)
        self._event.clear()
        return was_set


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()

    def sleep_until_s(self, when_s: float) -> None:
        remaining_s = when_s - time.monotonic()
        if remaining_s > 0:
            time.sleep(remaining_s)

    def signal(self) -> Signal:
        return _RealSignal(self)

    def start_thread(self, target: Callable[[], None], *, name: str, rank: int = 0) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread
