"""A clock for threads that advances only when every one of its threads waits.

Threads started by `start_thread` are the clock's *members*. Exactly one member runs at a time; it runs until it waits
(`sleep_until_s`, `Signal.wait`) or ends. Then, in this order:

1. the member whose signal was set first goes on, at the same instant;
2. when none is ready, time jumps to the earliest time-out and its member goes on; ties go by rank, then by who
   began to wait first;
3. when there is no time-out either, everything rests until a thread outside sets a signal.

Waiting for a signal until a moment that has passed lets everybody who is ready go first; sleeping until then returns at
once.

So a run of the real threads, with their real hand-overs, is a function of its inputs and takes no time. Other threads
may read the clock, set signals, start members and join them, but not wait on it. A member that is started from outside
begins at once; to begin several at one instant, start them from a member.

The idea of a clock that jumps when all tasks wait is that of trio's MockClock; threads need the one-at-a-time rule on
top, or their order at one instant would be the operating system's choice.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable


class _Member:
    __slots__ = ("go", "name", "rank", "timer_id", "waits_for")

    def __init__(self, name: str, rank: int) -> None:
        self.name = name
        self.rank = rank
        self.go = threading.Lock()  # released once to let the member go on
        self.go.acquire()
        self.waits_for: _VirtualSignal | None = None
        self.timer_id: int | None = None  # of the time-out that may still wake it


class _VirtualSignal:
    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.is_set = False
        self.waiter: _Member | None = None

    def set(self) -> None:
        self._clock._set(self)

    def wait(self, until_s: float | None = None) -> bool:
        return self._clock._wait(self, until_s)


class VirtualClock:
    """Implements `flowprefill.clock.Timekeeper`."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._lock = threading.Lock()
        self._rests = threading.Condition(self._lock)
        self._local = threading.local()
        self._running: _Member | None = None
        self._ready: deque[_Member] = deque()
        self._timers: list[tuple[float, int, int, _Member]] = []
        self._ids = itertools.count()

    def now_s(self) -> float:
        return self._now_s

    def signal(self) -> _VirtualSignal:
        return _VirtualSignal(self)

    def start_thread(self, target: Callable[[], None], *, name: str, rank: int = 0) -> threading.Thread:
        member = _Member(name, rank)

        def main() -> None:
            self._local.member = member
            member.go.acquire()
            try:
                target()
            finally:
                with self._lock:
                    self._next()

        thread = threading.Thread(target=main, name=name, daemon=True)
        thread.start()
        with self._lock:
            self._make_ready(member)
        return thread

    def wait_at_rest(self, timeout_s: float | None = None) -> bool:
        """Wait, in a thread that is no member, until every member waits without a time-out or has ended.

        Real seconds; False when it took longer.
        """
        with self._lock:
            return self._rests.wait_for(lambda: self._running is None, timeout_s)

    def sleep_until_s(self, when_s: float) -> None:
        member = self._member()
        with self._lock:
            if when_s <= self._now_s:
                return
            if not self._ready and (not self._timers or when_s < self._timers[0][0]):
                self._now_s = when_s  # nobody else has anything to do before
                return
            self._arm(member, when_s)
            self._next()
        member.go.acquire()

    # Signals.

    def _wait(self, signal: _VirtualSignal, until_s: float | None) -> bool:
        member = self._member()
        with self._lock:
            if not signal.is_set:
                assert signal.waiter is None, "a signal has one waiter"
                signal.waiter = member
                member.waits_for = signal
                if until_s is not None:
                    self._arm(member, until_s)
                self._next()
                waits = True
            else:
                waits = False
        if waits:
            member.go.acquire()
        with self._lock:
            was_set, signal.is_set = signal.is_set, False
        return was_set

    def _set(self, signal: _VirtualSignal) -> None:
        with self._lock:
            signal.is_set = True
            member = signal.waiter
            if member is not None:
                self._stop_waiting(member)
                self._make_ready(member)

    # With the lock held.

    def _arm(self, member: _Member, when_s: float) -> None:
        member.timer_id = next(self._ids)
        heapq.heappush(self._timers, (when_s, member.rank, member.timer_id, member))

    def _stop_waiting(self, member: _Member) -> None:
        member.timer_id = None
        if member.waits_for is not None:
            member.waits_for.waiter = None
            member.waits_for = None

    def _make_ready(self, member: _Member) -> None:
        self._ready.append(member)
        if self._running is None:
            self._next()

    def _next(self) -> None:
        """The running member waits or has ended: choose who goes on."""
        while self._timers and self._timers[0][3].timer_id != self._timers[0][2]:
            heapq.heappop(self._timers)  # its member was woken by a signal
        if self._ready:
            member = self._ready.popleft()
        elif self._timers:
            when_s, _, _, member = heapq.heappop(self._timers)
            self._now_s = max(when_s, self._now_s)
            self._stop_waiting(member)
        else:
            self._running = None
            self._rests.notify_all()
            return
        self._running = member
        member.go.release()

    def _member(self) -> _Member:
        member: _Member | None = getattr(self._local, "member", None)
        if member is None:
            raise RuntimeError(
                f"thread {threading.current_thread().name!r} waits on a virtual clock; "
                "only threads started by start_thread may"
            )
        return member
