"""An asyncio event loop whose clock jumps to the next timer whenever nothing is ready. No sockets, no waiting."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "every task waits and no timer is set: a deadlock"
            self.now_s += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and moves only while everything waits."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping.now_s

    now_s = time


class LoopClock:
    """The running loop's time as a `Clock`."""

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on a virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
