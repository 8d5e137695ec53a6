"""A rank's gate for one step: ranks stop together, at a place that all of them are sure to reach.

`execution.collective` holds the rule and its proof, for plans that know how many points lie between two collectives. How many a
model of vLLM passes is not known beforehand: tiles, chunks and caches change it. So ranks count *meetings* in place of points: the points
behind a collective (`engines.vllm_engine.collectives`). Between two meetings of the count lies one meeting, K = 1: a leader with m
behind it has not entered the collective before meeting m + 1, so no rank has left that one, and all find `stop` there.

On a device that computes by itself a collective does not hold the host back, but how far the host runs ahead of its device does:
`run_ahead` points at most, and so many meetings later at most the ranks stop.
"""

from __future__ import annotations

from collections.abc import Callable

from flowprefill.clock import Signal
from flowprefill.engines.protocol import Gate, Plan, TaskUnwound
from flowprefill.execution.collective import LEADER, RankGate, StopBoard
from flowprefill.server.vllm.ranks.page import Row


class MeetingGate:
    """Implements `engines.protocol.Gate`. `own` is the gate of this rank's pool."""

    def __init__(
        self,
        board: StopBoard,
        *,
        rank: int,
        own: Gate,
        num_meetings: Callable[[], int],
        run_ahead: int = 0,
        at_point: Callable[[int], None] | None = None,
    ) -> None:
        """`num_meetings` counts what the step has behind it; `at_point` is told of every point."""
        self._own = own
        self._num_meetings = num_meetings
        self._at_point = at_point
        self._met = 0
        self._index = 0
        self._together = RankGate(
            board,
            rank=rank,
            points_between_collectives=1 + run_ahead,
            inner=_Asked(self, own) if rank == LEADER else None,
        )

    @property
    def raised(self) -> bool:
        return self._together.raised

    @property
    def index(self) -> int:
        return self._index

    @index.setter
    def index(self, index: int) -> None:
        self._index = self._own.index = index
        met = self._num_meetings()
        self._met = met
        self._together.index = met
        if self._at_point is not None:
            self._at_point(index)

    def pause(self, index: int) -> None:
        self._together.pause(self._met)


class _Asked:
    """The gate of the leader's pool as `RankGate` sees it: places are meetings there and points here."""

    def __init__(self, gate: MeetingGate, own: Gate) -> None:
        self._gate = gate
        self._own = own
        self.index = 0

    @property
    def raised(self) -> bool:
        return self._own.raised

    def pause(self, index: int) -> None:
        self._own.pause(self._gate.index)


class LeaderBoard:
    """The leader's view of the page and of its followers; implements `StopBoard`."""

    def __init__(self, row: Row, wake: Signal, let_go: Callable[[bool], None]) -> None:
        """`let_go(unwind)` tells the followers."""
        self._row = row
        self._wake = wake
        self._let_go = let_go
        self._gathered = False

    @property
    def stop(self) -> int | None:
        return self._row.stop

    def publish(self, stop: int) -> None:
        self._row.stop = stop

    def furthest(self) -> int:
        return self._row.furthest()

    def wait_arrivals(self) -> None:
        while not self._gathered:
            self._wake.wait()

    def gathered(self) -> None:
        """All followers stand at `stop`, or will never come. Another thread's."""
        self._gathered = True
        self._wake.set()

    def release(self, *, unwind: bool) -> None:
        self._gathered = False
        self._row.stop = None
        self._let_go(unwind)

    def passes(self, rank: int, index: int) -> None:
        raise AssertionError("the leader has its pool's gate")

    def stand(self, rank: int) -> bool:
        raise AssertionError("the leader has its pool's gate")


class FollowerBoard:
    """A follower's view; implements `StopBoard`. It stands by parking in its own pool, which lets other steps run."""

    def __init__(self, row: Row, own: Gate, park: Callable[[], None]) -> None:
        """`park` asks this rank's pool to have the step park at its gate, `own`."""
        self._row = row
        self._own = own
        self._park = park

    @property
    def stop(self) -> int | None:
        return self._row.stop

    def passes(self, rank: int, index: int) -> None:
        self._row.passes(rank, index)

    def stand(self, rank: int) -> bool:
        self._park()
        try:
            self._own.pause(self._own.index)
        except TaskUnwound:
            return True
        return False

    def publish(self, stop: int) -> None:
        raise AssertionError("the leader says where to stop")

    def furthest(self) -> int:
        raise AssertionError("the leader says where to stop")

    def wait_arrivals(self) -> None:
        raise AssertionError("the leader waits for the others")

    def release(self, *, unwind: bool) -> None:
        raise AssertionError("the leader lets go")


def telling(row: Row, plan: Plan) -> Callable[[int], None]:
    """Notes the work done before each point in the page."""

    def at_point(index: int) -> None:
        row.work_done = plan.work_done(index)

    return at_point
