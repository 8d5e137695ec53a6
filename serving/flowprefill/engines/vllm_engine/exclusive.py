"""One thread at a time inside vLLM's worker, in order of asking.

The execution pool's baton says which task advances. Unwinding is outside it: a cancelled task that stood parked raises
through vLLM's context managers, which write module globals that the advancing task uses. So whoever runs code of vLLM,
advancing or unwinding, holds this lock; the advancing task gives way at its next preemption point to one that asks.
"""

from __future__ import annotations

import threading


class Exclusive:
    """A fair lock that tells its holder when somebody waits."""

    __slots__ = ("_condition", "_next", "_serving", "wanted")

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._next = 0
        self._serving = 0
        self.wanted = False
        """Whether somebody waits for the holder. Read without the lock."""

    def acquire(self) -> None:
        """Wait until all who asked before have released."""
        with self._condition:
            ticket = self._next
            self._next += 1
            self._note()
            while self._serving != ticket:
                self._condition.wait()
            self._note()

    def release(self) -> None:
        """Let the next one in."""
        with self._condition:
            assert self._serving < self._next, "released by somebody who does not hold it"
            self._serving += 1
            self._note()
            self._condition.notify_all()

    def _note(self) -> None:
        self.wanted = self._next - self._serving > 1

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()
