"""Ranks of one model as state machines, moved one step at a time in a random order: who stops where, and whether anybody hangs.

The gates, boards and the page are the product's own. What blocks raises `_Blocked` here, and is tried again when its rank's turn
comes: no threads, so a hundred thousand runs take seconds. Messages between core and ranks are steps too, in order on each link.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flowprefill.engines.protocol import TaskUnwound
from flowprefill.execution.collective import LEADER, RanPastStop
from flowprefill.server.vllm.ranks.gate import FollowerBoard, LeaderBoard, MeetingGate
from flowprefill.server.vllm.ranks.page import PageShape, Row

Part = Literal["collective", "point", "meeting"]
"""Of a forward: a collective of all ranks; a point; a point that says that a collective lies before it."""


class _Blocked(BaseException):
    """This rank cannot go on now."""


class _OwnGate:
    """A pool's gate. Followers' are asked by their board, the leader's by the control."""

    def __init__(self) -> None:
        self.index = 0
        self.raised = False
        self.parked = False
        self.cancelled = False

    def request(self) -> None:
        if not self.parked:
            self.raised = True

    def resume(self) -> None:
        self.parked = False

    def pause(self, index: int) -> None:
        if self.cancelled:
            raise TaskUnwound
        if self.raised and not self.parked:
            self.raised, self.parked = False, True
        if self.parked:
            raise _Blocked


class _Wake:
    def set(self) -> None:
        return

    def wait(self, until_s: float | None = None) -> bool:
        raise _Blocked


@dataclass(slots=True)
class _Rank:
    rank: int
    own: _OwnGate
    gate: MeetingGate
    num_meetings: int = 0
    position: int = 0
    index: int = -1
    entered: int = 0
    inside: bool = False
    pausing: bool = False
    standing: bool = False
    at_window: bool = False
    device_position: int = 0
    device_points: int = 0
    device_collectives: int = 0
    stood_at: list[int] = field(default_factory=list)
    end: str | None = None


def random_parts(
    chance: random.Random, *, most_stretches: int = 8, false_meetings: bool = False
) -> list[Part]:
    """A forward: tiles of operators between collectives, of which some have no meeting behind them.

    `false_meetings` puts some where no collective lies before.
    """
    parts: list[Part] = []
    behind_one = False
    for _ in range(chance.randint(1, most_stretches)):
        for _ in range(chance.choice([0, 1, 2, 3, chance.randint(1, 9)])):
            marked = behind_one and chance.random() < 0.8
            if false_meetings and not behind_one:
                marked = chance.random() < 0.5
            parts.append("meeting" if marked else "point")
            behind_one = False
        for _ in range(chance.choice([1, 1, 1, 2])):
            parts.append("collective")
            behind_one = True
    parts += ["point"] * chance.randint(0, 2)
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What many runs came to. `troubles` are deadlocks and disagreements, with their seeds."""

    num_runs: int
    num_pauses: int
    num_unwound: int
    troubles: tuple[str, ...]


def agreement(num_runs: int, *, first_seed: int = 0, **how: Any) -> Agreement:
    """Random plans and skews, as many as asked for. About a millisecond each; `how` is `MeetingRanks`'s."""
    pauses = unwound = 0
    troubles: list[str] = []
    for seed in range(first_seed, first_seed + num_runs):
        ranks = MeetingRanks(seed, **how).run()
        pauses += len(ranks.pauses)
        unwound += ranks.ranks[LEADER].end == "unwound"
        if ranks.trouble is not None:
            troubles.append(f"seed {seed}: {ranks.trouble}")
    return Agreement(num_runs=num_runs, num_pauses=pauses, num_unwound=unwound, troubles=tuple(troubles))


class MeetingRanks:
    """One step on several ranks, paused and let go, or unwound, at random moments. `trouble` is what went wrong."""

    def __init__(
        self,
        seed: int,
        *,
        parts: Sequence[Part] | None = None,
        false_meetings: bool = False,
        lookahead: int = 0,
        run_ahead: int | None = None,
    ) -> None:
        """With a `lookahead` each rank has a device: hosts only launch, at most so many points ahead of what it has done.

        `run_ahead` is what the gates are told of it, by default one more.
        """
        self.lookahead = lookahead
        self._run_ahead = (lookahead + 1 if lookahead else 0) if run_ahead is None else run_ahead
        self.chance = chance = random.Random(seed)
        most_stretches = 40 if lookahead else 8
        self.parts = parts or random_parts(
            chance, most_stretches=most_stretches, false_meetings=false_meetings
        )
        num_ranks = chance.choice([2, 2, 3, 4])
        shape = PageShape(num_slots=1, num_ranks=num_ranks)
        self.row = Row(memoryview(bytearray(shape.size_bytes)).cast("q"))
        self.row.reset()
        self.pauses: list[int] = []  # points at which all stood
        self.trouble: str | None = None
        self._messages: dict[str, deque[Callable[[], None]]] = {}
        self._standing: set[int] = set()
        self._leader_board = LeaderBoard(self.row, _Wake(), self._let_go)
        self.ranks = [self._rank(rank) for rank in range(num_ranks)]
        # Some ranks are slow all the time, and some at times.
        paces = (chance.choice([1.0, 1.0, 0.2, 0.02]) for _ in self.ranks)
        self._paces = list(itertools.accumulate(paces))
        self._control = chance.choice([0.02, 0.1, 0.5])
        self.cancels = chance.random() < 0.2

    def run(self) -> MeetingRanks:
        """To the end, or to trouble."""
        idle = 0
        while self.trouble is None and any(rank.end is None for rank in self.ranks):
            moved = self._step()
            idle = 0 if moved else idle + 1
            if idle > 50 and not self._can_move():
                self.trouble = "deadlock: " + ", ".join(
                    f"{r.position}{'!' if r.end else ''}" for r in self.ranks
                )
        ends = {rank.end for rank in self.ranks}
        if self.trouble is None and len(ends) > 1:
            self.trouble = f"different ends: {ends}"
        if self.trouble is None and len({tuple(rank.stood_at) for rank in self.ranks}) > 1:
            self.trouble = f"stood at different points: {[rank.stood_at for rank in self.ranks]}"
        return self

    # One step of something.

    def _step(self) -> bool:
        if self.chance.random() < self._control:
            return self._do_control()
        links = [link for link, waiting in self._messages.items() if waiting]
        if links and self.chance.random() < 0.3:
            self._messages[self.chance.choice(links)].popleft()()
            return True
        (rank,) = self.chance.choices(self.ranks, cum_weights=self._paces)
        if self.lookahead and self.chance.random() < 0.5:
            return self._compute(rank)
        return self._advance(rank)

    def _can_move(self) -> bool:
        """Whether anything can still happen: messages under way, a parked leader to be let go, a rank to advance."""
        leader = self.ranks[LEADER]
        if leader.own.parked or any(self._messages.values()):
            return True
        return any(self._advance(rank) or (self.lookahead > 0 and self._compute(rank)) for rank in self.ranks)

    def _do_control(self) -> bool:
        own = self.ranks[LEADER].own
        if own.parked:
            if self.cancels and self.chance.random() < 0.3:
                own.cancelled = True
            else:
                own.resume()
            return True
        if own.raised and self.chance.random() < 0.2:
            own.raised = own.cancelled  # withdrawn
        elif self.cancels and self.chance.random() < 0.05:
            own.cancelled = own.raised = True
        else:
            own.request()
        return False

    def _advance(self, rank: _Rank) -> bool:
        if rank.end is not None:
            return False
        before = rank.index, rank.standing, rank.own.parked
        try:
            if rank.pausing:
                self._pause(rank)
            elif rank.at_window:
                self._pass_window(rank)
            elif rank.position == len(self.parts):
                rank.end = "completed"
            elif self.parts[rank.position] == "collective":
                return self._collective(rank)
            else:
                self._point(rank)
        except _Blocked:
            return before != (rank.index, rank.standing, rank.own.parked)
        except TaskUnwound:
            rank.end = "unwound"
        except RanPastStop as error:
            self.trouble = f"ran past: {error}"
        return True

    def _collective(self, rank: _Rank) -> bool:
        if self.lookahead:  # only launched
            rank.entered += 1
            rank.position += 1
            return True
        if not rank.inside:
            rank.inside = True
            rank.entered += 1
            return True
        if min(other.entered for other in self.ranks) < rank.entered:
            return False
        rank.inside = False
        rank.position += 1
        return True

    def _point(self, rank: _Rank) -> None:
        rank.index += 1
        rank.num_meetings += self.parts[rank.position] == "meeting"
        rank.gate.index = rank.index
        rank.at_window = True
        self._pass_window(rank)

    def _pass_window(self, rank: _Rank) -> None:
        """Wait for the device, unless somebody is to stop; then look at the gate."""
        behind = rank.index - self.lookahead
        if self.lookahead and behind >= rank.device_points and not rank.gate.raised:
            raise _Blocked
        rank.at_window = False
        if rank.gate.raised:
            rank.pausing = True
            self._pause(rank)
        else:
            rank.position += 1

    def _compute(self, rank: _Rank) -> bool:
        """The rank's device does the next thing that its host has launched."""
        if rank.device_position >= rank.position:
            return False
        if self.parts[rank.device_position] == "collective":
            if min(other.entered for other in self.ranks) <= rank.device_collectives:
                return False
            rank.device_collectives += 1
        else:
            rank.device_points += 1
        rank.device_position += 1
        return True

    def _pause(self, rank: _Rank) -> None:
        if rank.standing:  # within `stand`, which waits in its own gate
            rank.own.pause(rank.index)
            rank.standing = False
        else:
            rank.gate.pause(rank.index)
        rank.pausing = False
        rank.position += 1

    # What is between the ranks.

    def _rank(self, rank: int) -> _Rank:
        own = _OwnGate()
        board = (
            self._leader_board if rank == LEADER else FollowerBoard(self.row, own, lambda: self._park(rank))
        )
        made: _Rank
        gate = MeetingGate(
            board, rank=rank, own=own, num_meetings=lambda: made.num_meetings, run_ahead=self._run_ahead
        )
        made = _Rank(rank=rank, own=own, gate=gate)
        return made

    def _park(self, rank: int) -> None:
        """A follower's pool is asked to park the step."""
        follower = self.ranks[rank]
        follower.standing = True
        follower.own.request()
        follower.stood_at.append(follower.index)
        self._send(f"from {rank}", lambda: self._stands(rank))

    def _stands(self, rank: int) -> None:
        self._standing.add(rank)
        if len(self._standing) == len(self.ranks) - 1:
            self._standing.clear()
            self._send("to leader", self._leader_board.gathered)

    def _let_go(self, unwind: bool) -> None:
        leader = self.ranks[LEADER]
        leader.stood_at.append(leader.index)
        self.pauses.append(leader.index)
        for follower in self.ranks[1:]:
            own = follower.own

            def arrive(own: _OwnGate = own) -> None:
                own.cancelled = own.cancelled or unwind
                own.resume()

            self._send(f"to {follower.rank}", arrive)

    def _send(self, link: str, deliver: Callable[[], None]) -> None:
        self._messages.setdefault(link, deque()).append(deliver)
