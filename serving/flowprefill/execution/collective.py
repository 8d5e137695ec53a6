"""Pausing a model that is split over several ranks: all of them stop at the same point, or none does.

Ranks run the same plan, each at its own pace; only collectives (all-reduce) hold them together. If they paused at
different points, one would wait in a collective that another never enters. So:

1. The leader, asked to pause at point c, publishes `stop = c + K` and goes on. K is the most points that the plan has
   between two collectives, the same number on every rank.
2. Every rank pauses at exactly `stop`. All have then entered the same collectives.
3. The leader answers its own gate (`Parked`, `TaskUnwound`) once all ranks stand, and lets them go, or unwinds them, after.

Why K is enough: the leader at c has left the last collective before c, so no rank is past the next one, which the leader
has not entered; between the two lie at most K points, so every rank is still before c + K. Why less is not: a rank that
waits in the next collective may have passed K points since the last one. A rank beyond `stop` is therefore a bug in the
plan or in K, and fatal: nothing could bring the ranks together again. Ranks note how far they are, so that the leader
also notices one that is past the stop and waits in a collective, where it would otherwise wait forever.

A stop beyond the plan's last point pauses nobody: the batch completes, which overtakes the request. Each task has its own
board, so nothing of one batch is ever read in another.
"""

from __future__ import annotations

import threading
from typing import Protocol

from flowprefill.clock import Timekeeper
from flowprefill.engines.protocol import EngineBroken, Gate, TaskUnwound

LEADER = 0


class RanPastStop(EngineBroken):
    """A rank is beyond the agreed point: the ranks cannot meet any more."""


class StopBoard(Protocol):
    """What the ranks of one task share. `stop` is read at every point and must be cheap."""

    @property
    def stop(self) -> int | None:
        """The point at which all ranks pause; None when nobody is to."""
        ...

    def publish(self, stop: int) -> None:
        """Leader: set `stop`."""
        ...

    def passes(self, rank: int, index: int) -> None:
        """Other ranks: note a point, before looking at `stop`. As cheap as `stop`."""
        ...

    def furthest(self) -> int:
        """Leader: the last point that any other rank has noted, -1 before the first."""
        ...

    def wait_arrivals(self) -> None:
        """Leader: return once every other rank stands at `stop`."""
        ...

    def release(self, *, unwind: bool) -> None:
        """Leader: clear `stop`, then let the others go on, or unwind."""
        ...

    def stand(self, rank: int) -> bool:
        """Other ranks: arrive at `stop` and wait for the release; True to unwind."""
        ...


class RankGate:
    """One rank's gate for one task; implements `engines.protocol.Gate`.

    `inner` is the pool's gate on the leader and None elsewhere. `points_between_collectives` is the plan's K.
    """

    def __init__(
        self, board: StopBoard, *, rank: int, points_between_collectives: int, inner: Gate | None = None
    ) -> None:
        assert (inner is not None) == (rank == LEADER), "the leader, and no other rank, has the pool's gate"
        self._board = board
        self._rank = rank
        self._k = points_between_collectives
        self._inner = inner
        self._index = 0

    @property
    def raised(self) -> bool:
        return self._board.stop is not None or (self._inner is not None and self._inner.raised)

    @property
    def index(self) -> int:
        return self._index

    @index.setter
    def index(self, index: int) -> None:
        self._index = index
        if self._inner is not None:
            self._inner.index = index
        else:
            self._board.passes(self._rank, index)

    def pause(self, index: int) -> None:
        stop = self._board.stop
        if stop is None:
            if self._inner is None or not self._inner.raised:
                return  # released, or withdrawn, since `raised` was read
            stop = index + self._k
            if (furthest := self._board.furthest()) >= stop:
                raise RanPastStop(
                    f"a rank is at point {furthest}, and the leader at {index} may stop it at {stop}"
                )
            self._board.publish(stop)
        if index < stop:
            return
        if index > stop:
            raise RanPastStop(f"rank {self._rank} is at point {index}, and the ranks agreed on {stop}")
        if self._inner is None:
            if self._board.stand(self._rank):
                raise TaskUnwound
            return
        self._board.wait_arrivals()
        try:
            self._inner.pause(index)
        except TaskUnwound:
            self._board.release(unwind=True)
            raise
        self._board.release(unwind=False)


class LocalBoard:
    """A board for ranks that are threads of one process."""

    def __init__(self, clock: Timekeeper, num_ranks: int) -> None:
        self._lock = threading.Lock()
        self._stop: int | None = None
        self._num_others = num_ranks - 1
        self._passed = [-1] * num_ranks
        self._arrived: set[int] = set()
        self._unwind = False
        self._leader_wake = clock.signal()
        self._wakes = [clock.signal() for _ in range(num_ranks)]

    @property
    def stop(self) -> int | None:
        return self._stop

    def publish(self, stop: int) -> None:
        self._stop = stop

    def passes(self, rank: int, index: int) -> None:
        self._passed[rank] = index

    def furthest(self) -> int:
        return max(self._passed)

    def wait_arrivals(self) -> None:
        while True:
            with self._lock:
                if len(self._arrived) == self._num_others:
                    return
            self._leader_wake.wait()

    def release(self, *, unwind: bool) -> None:
        with self._lock:
            self._stop = None
            self._unwind = unwind
            waiting = tuple(self._arrived)
            self._arrived.clear()
        for rank in waiting:
            self._wakes[rank].set()

    def stand(self, rank: int) -> bool:
        with self._lock:
            self._arrived.add(rank)
        self._leader_wake.set()
        while True:
            self._wakes[rank].wait()
            with self._lock:
                if rank not in self._arrived:
                    return self._unwind
