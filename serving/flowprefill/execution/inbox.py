"""The scheduler's inbox: everything that happens reaches its thread through here, in one order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from flowprefill.clock import Timekeeper
from flowprefill.errors import QueueFull, Unavailable
from flowprefill.request import Request
from flowprefill.scheduling.actions import Task
from flowprefill.scheduling.events import Arrival, CapacityFreed, Event


class Inbox:
    """A queue of events with one reader. Every method but `take` may be called from any thread.

    Arrivals are bounded by `limit` requests that the reader has not taken yet. Other events are few by nature
    (one per task or per request that was accepted) and are never refused.
    """

    def __init__(self, clock: Timekeeper, *, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"the inbox limit is {limit}; accepted are integers from 1")
        self._limit = limit
        self._lock = threading.Lock()
        self._wake = clock.signal()
        self._events: deque[Event] = deque()
        self._num_arrivals = 0
        self._outstanding: set[str] = set()  # no outcome yet
        self._running: set[str] = set()  # in a task of the pool
        self._holding: set[str] = set()  # completed, and their blocks are not released
        self._closed_because: str | None = None
        self._error: BaseException | None = None

    def submit(self, requests: Sequence[Request], *, bounded: bool = True) -> None:
        """Put requests in as one arrival, all or none.

        Raises `QueueFull` when there is no room (not when `bounded` is False), `Unavailable` when the inbox is
        closed, ValueError for an id that the scheduler may still know.
        """
        if not requests:
            return
        with self._lock:
            if self._closed_because is not None:
                raise Unavailable(self._closed_because)
            if bounded and self._num_arrivals + len(requests) > self._limit:
                raise QueueFull(
                    f"the scheduler's inbox holds {self._num_arrivals} requests and {len(requests)} more do not fit; "
                    f"its limit is {self._limit}"
                )
            request_ids = {request.request_id for request in requests}
            in_use = self._in_use(request_ids)
            if in_use or len(request_ids) < len(requests):
                named = sorted(in_use or request_ids)
                raise ValueError(
                    f"request ids {named} are given twice or in use; accepted are ids of no request that waits, "
                    "runs or holds KV blocks"
                )
            self._outstanding |= request_ids
            self._num_arrivals += len(requests)
            self._events.append(Arrival(requests=tuple(requests)))
        self._wake.set()

    def post(self, event: Event) -> None:
        """Put in an event that is never refused."""
        with self._lock:
            self._events.append(event)
        self._wake.set()

    def fail(self, error: BaseException) -> None:
        """Make the reader's next `take` raise `error`."""
        with self._lock:
            self._error = error
        self._wake.set()

    def close(self, because: str) -> None:
        """Refuse new requests from now on, and wake the reader."""
        with self._lock:
            if self._closed_because is None:
                self._closed_because = because
        self._wake.set()

    def take(self, until_s: float | None) -> list[Event]:
        """Everything put in since the last call; waits for something until `until_s`, or forever."""
        with self._lock:
            empty = not self._events and self._error is None and self._closed_because is None
        if empty:
            self._wake.wait(until_s)
        with self._lock:
            if self._error is not None:
                raise self._error
            events = list(self._events)
            self._events.clear()
            self._num_arrivals = 0
            return events

    def release(self, request_ids: Sequence[str]) -> None:
        """Put in that these completed requests need their blocks no more."""
        with self._lock:
            self._holding.difference_update(request_ids)
            self._events.append(CapacityFreed(request_ids=tuple(request_ids)))
        self._wake.set()

    # The reader's notes on who is where.

    def task_began(self, task: Task) -> None:
        """The task's requests are in the pool."""
        with self._lock:
            self._running.update(item.request_id for item in task.items)

    def task_ended(self, task: Task) -> None:
        """The task's requests are no longer in the pool."""
        with self._lock:
            self._running.difference_update(item.request_id for item in task.items)

    def settled(self, request_id: str, *, holds_blocks: bool = False) -> bool:
        """The request has its outcome, and holds blocks until `release` if it says so. False for a second one."""
        with self._lock:
            if request_id not in self._outstanding:
                return False
            self._outstanding.remove(request_id)
            if holds_blocks:
                self._holding.add(request_id)
            return True

    def _in_use(self, request_ids: set[str]) -> set[str]:
        return {i for i in request_ids if i in self._outstanding or i in self._running or i in self._holding}

    def outstanding(self) -> tuple[str, ...]:
        """Ids of all requests without an outcome, sorted."""
        with self._lock:
            return tuple(sorted(self._outstanding))

    @property
    def num_outstanding(self) -> int:
        """Requests without an outcome."""
        with self._lock:
            return len(self._outstanding)

    @property
    def closed(self) -> bool:
        """Whether new requests are refused."""
        with self._lock:
            return self._closed_because is not None
