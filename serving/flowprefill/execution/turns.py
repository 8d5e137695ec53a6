"""The rules that both drivers keep (the thread with a clock, and the simulator), in one place.

A *turn* is one pass over everything that lies in the inbox:

1. Adjacent arrivals become one event, in order: a burst costs one decision.
2. Each event is handled at the clock's time, with the running task's progress, and its actions are carried out
   before the next event is looked at.
3. Then a `Tick` is handled when the scheduler's next moment has come, so that no load can starve it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from flowprefill.request import Request
from flowprefill.scheduling.events import Arrival, Completed, Event, Failed, Parked, Progress

TICK_GAP_S = 0.001
"""The least time between two ticks: a moment that rounding places at `now` again does not become a busy loop."""


def coalesce(events: Iterable[Event]) -> Iterator[Event]:
    """The same events with adjacent arrivals merged into one."""
    burst: list[Request] = []
    for event in events:
        if isinstance(event, Arrival):
            burst.extend(event.requests)
            continue
        if burst:
            yield Arrival(requests=tuple(burst))
            burst.clear()
        yield event
    if burst:
        yield Arrival(requests=tuple(burst))


def with_progress(event: Event, progress: Progress | None) -> Event:
    """The event with the running task's progress; events about a task itself carry its own already."""
    if progress is None or isinstance(event, Parked | Completed | Failed):
        return event
    return replace(event, progress=progress)


class TickTimer:
    """When the next `Tick` is due."""

    def __init__(self) -> None:
        self._not_before_s = float("-inf")

    def due_s(self, next_tick_s: float | None) -> float | None:
        """The moment of the next tick, given what the scheduler asks for; None when it asks for none."""
        return None if next_tick_s is None else max(next_tick_s, self._not_before_s)

    def ticked(self, now_s: float) -> None:
        """A tick was handled at `now_s`."""
        self._not_before_s = now_s + TICK_GAP_S
