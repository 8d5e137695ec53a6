"""Aged work over the whole scheduler: what it has received, whether it is its turn, when that changes."""

from __future__ import annotations

from flowprefill.scheduling.ageing import ServiceAccount, aged_fraction
from flowprefill.scheduling.settings import Ageing
from flowprefill.scheduling.state import ActiveTask
from flowprefill.scheduling.tasks import TaskTable
from flowprefill.scheduling.waiting import WaitingQueue


class AgedWork:
    """Keeps the account of aged requests, waiting or in tasks. Does nothing when ageing is off."""

    def __init__(self, ageing: Ageing | None, queue: WaitingQueue, tasks: TaskTable) -> None:
        self._queue = queue
        self._tasks = tasks
        self._gathering_since_s: float | None = None
        self.configure(ageing)

    def configure(self, ageing: Ageing | None) -> None:
        self._ageing = ageing
        self._account = ServiceAccount(ageing)

    @property
    def boosting(self) -> bool:
        """Whether it is the turn of the oldest aged request."""
        return self._account.boosting

    def exists(self, now_s: float) -> bool:
        if self._ageing is None or self._queue.aged is None:
            return False
        return self._queue.aged.any_aged or any(
            aged_fraction(task, self._ageing, now_s) > 0.0 for task in self._tasks.all()
        )

    def serve(self, task: ActiveTask, executed_s: float, now_s: float) -> None:
        """The task has held the baton for `executed_s` in all; older news changes nothing."""
        gained_s = executed_s - task.executed_s
        if gained_s <= 0.0:
            return
        task.executed_s = executed_s
        if self.exists(now_s):
            self._account.served(gained_s, aged_fraction(task, self._ageing, now_s))

    def gather(self, now_s: float) -> None:
        """From now the engine idles so that blocks gather for an aged request; that is service to it."""
        self._gathering_since_s = now_s

    def pass_time(self, now_s: float) -> None:
        """Count idling since the last event, and see who has aged."""
        if self._queue.aged is not None:
            self._queue.aged.advance(now_s)
        if self._gathering_since_s is not None:
            self._account.served(now_s - self._gathering_since_s, 1.0)
            self._gathering_since_s = None
        if not self.exists(now_s):
            self._account.reset()

    def next_turn_s(self, now_s: float) -> float | None:
        """When its turn begins or ends if things go on as they are, or when a request ages; None when never."""
        running = self._tasks.running
        if running is not None:
            fraction = aged_fraction(running, self._ageing, now_s)
        elif self._gathering_since_s is not None:
            fraction = 1.0
        else:
            return None
        if not self.exists(now_s):
            return self._queue.aged.next_s if self._queue.aged is not None else None
        seconds = self._account.turns_in_s(fraction)
        return None if seconds is None else now_s + seconds
