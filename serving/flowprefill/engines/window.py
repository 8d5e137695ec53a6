"""Bounds how far launches run ahead of a GPU, so that a pause request is answered soon (DESIGN: preemption gate).

A CPU operator is done when its call returns. A GPU's is not: the host may have launched a whole prefill before
the device finished its first layer, and stopping the host would then stop nothing. At each point an event is recorded;
the host goes on only when the event of `lookahead` points ago has passed, or a pause is asked for. What has been
launched before a pause still runs, at most `lookahead` operators, and precedes the next task's work on the one stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from flowprefill.engines.protocol import Gate


class DeviceEvent(Protocol):
    """A mark in the device's work queue; `torch.cuda.Event` is one."""

    def record(self) -> None: ...
    def query(self) -> bool: ...


class LaunchWindow:
    """Keeps at most `lookahead` points' worth of work in flight. Used by the advancing thread only."""

    def __init__(self, make_event: Callable[[], DeviceEvent], lookahead: int) -> None:
        if lookahead < 1:
            raise ValueError(f"lookahead is {lookahead}; accepted are integers from 1")
        self._events = [make_event() for _ in range(lookahead)]
        self._recorded = 0

    def advance(self, gate: Gate) -> None:
        """Wait until the event of `lookahead` points ago has passed or `gate` asks to pause, then record this point."""
        event = self._events[self._recorded % len(self._events)]
        if self._recorded >= len(self._events):
            while not event.query():
                if gate.raised:
                    # The slot keeps its older event: after the pause the wait for it goes on.
                    return
        event.record()
        self._recorded += 1
