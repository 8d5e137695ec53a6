"""The clock seam. Decisions never read a clock: drivers do, and pass `now_s` in with events."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time in seconds, from an arbitrary origin."""

    def now_s(self) -> float:
        """Seconds since this clock's origin."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()
