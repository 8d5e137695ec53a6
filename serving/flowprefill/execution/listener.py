"""What the outside hears from the scheduler's thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flowprefill.execution.results import Finished
from flowprefill.scheduling.actions import Action, Outcome
from flowprefill.scheduling.events import Event
from flowprefill.scheduling.snapshot import SchedulerSnapshot


class DriverListener(Protocol):
    """Called on the scheduler's thread: it hands over (`loop.call_soon_threadsafe`) and returns at once.

    An error raised here is logged and does not stop the scheduler.
    """

    def on_finish(self, request_id: str, outcome: Outcome, reason: str, result: Finished | None) -> None:
        """The request's one outcome; `result` is there when it is `completed`."""
        ...

    def on_events(self, event: Event, actions: Sequence[Action], now_s: float) -> None:
        """The scheduler answered `event` with `actions`, for metrics. Comes before the actions are carried out."""
        ...

    def on_state(self, snapshot: SchedulerSnapshot) -> None:
        """The scheduler's state after a turn in which something happened."""
        ...

    def on_crash(self, error: BaseException) -> None:
        """The scheduler's thread is gone for good; every outstanding request has failed. The pod is not ready."""
        ...


class SilentListener:
    """Hears everything and does nothing; to be subclassed where only some of it matters."""

    def on_finish(self, request_id: str, outcome: Outcome, reason: str, result: Finished | None) -> None:
        return

    def on_events(self, event: Event, actions: Sequence[Action], now_s: float) -> None:
        return

    def on_state(self, snapshot: SchedulerSnapshot) -> None:
        return

    def on_crash(self, error: BaseException) -> None:
        return
