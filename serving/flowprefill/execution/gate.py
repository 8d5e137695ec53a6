"""The preemption gate: the one object that a task's thread and the scheduler's thread share.

Who writes what, and who reads it:

    raised      written under the pool's lock: set by `request` and `cancel` (scheduler's thread), cleared by
                `withdraw` (scheduler's thread) and by a park (task's thread). Read by the engine at every point
                *without* the lock: a stale False costs one more operator, a stale True one call of `pause`.
    index       written by the task's thread alone, at every point. Read by anybody, for progress.
    ticket      the pending pause request. Written under the lock: set by `request`, taken by the park that answers
                it, dropped by `withdraw`.
    parked      written under the lock: set by the task's thread, cleared by `resume` and by unwinding.
    cancelled   written under the lock by `cancel`, once and for good.

The rules:

1. A request is answered at most once, with its own ticket: the park takes the ticket in the same critical section
   in which it reports `Parked`. So an answer that is late carries an old number and cannot be taken for a new one.
2. `withdraw(ticket)` takes back exactly that request. When the task has parked already the answer stands, and the
   scheduler resumes the task as it would any other.
3. A cancelled task raises `TaskUnwound` at its next point and at every one after it; a parked task raises it where it
   stands, and no model code runs in between. While it unwinds, another task may advance: what an engine does on the
   way out (`finally`, context managers) touches only what belongs to the unwinding task.
4. How fine the points lie is the engine's plan's matter; the gate only counts them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from flowprefill.clock import Signal
from flowprefill.engines.protocol import TaskUnwound


class PreemptionGate:
    """One task's gate. The engine sees `flowprefill.engines.protocol.Gate`; the pool calls the rest under its lock."""

    __slots__ = ("_cancelled", "_lock", "_on_park", "_ticket", "_wake", "index", "parked", "raised")

    def __init__(self, lock: threading.Lock, wake: Signal, on_park: Callable[[int], None]) -> None:
        """`wake` wakes the task's thread; `on_park(ticket)` is called by it, with `lock` held, at every park."""
        self.raised = False
        self.index = 0
        self.parked = False
        self._cancelled = False
        self._ticket: int | None = None
        self._lock = lock
        self._wake = wake
        self._on_park = on_park

    # The task's thread.

    def pause(self, index: int) -> None:
        """Answer a pending request at point `index`: park, and return when resumed. See `protocol.Gate`.

        A request that comes before the resumed thread runs again is answered at the same point.
        """
        self.index = index
        while self._park():
            self._stand()

    def check_cancelled(self) -> None:
        """Raise `TaskUnwound` when the task has been cancelled; for the stretch before its first point."""
        with self._lock:
            if self._cancelled:
                raise TaskUnwound

    def _park(self) -> bool:
        with self._lock:
            if self._cancelled:
                raise TaskUnwound
            ticket, self._ticket = self._ticket, None
            self.raised = False
            if ticket is None:
                return False
            self.parked = True
            self._on_park(ticket)
            return True

    def _stand(self) -> None:
        while True:
            self._wake.wait()
            with self._lock:
                if self._cancelled:
                    self.parked = False
                    raise TaskUnwound
                if not self.parked:
                    return

    # The scheduler's thread, with the pool's lock held.

    @property
    def cancelled(self) -> bool:
        """Whether the task is to unwind."""
        return self._cancelled

    def request(self, ticket: int) -> None:
        """Ask the running task to park; the newest request replaces one that is still pending."""
        assert not self.parked, "a parked task needs no pause request"
        self._ticket = ticket
        self.raised = True

    def withdraw(self, ticket: int) -> None:
        """Take back this request unless it has been answered or replaced."""
        if self._ticket == ticket:
            self._ticket = None
            self.raised = self._cancelled

    def resume(self) -> None:
        """Let the parked task go on; its thread has the baton from now on."""
        assert self.parked, "only a parked task can be resumed"
        self.parked = False
        self._wake.set()

    def cancel(self) -> None:
        """Unwind the task at its next point, or where it stands."""
        self._cancelled = True
        self.raised = True
        self._wake.set()
