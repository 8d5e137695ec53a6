"""Ranks of one model pause together. Ranks are threads on a virtual clock, each at its own random pace."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowprefill.clock import Signal
from flowprefill.engines.protocol import TaskUnwound
from flowprefill.engines.simulated.cost import CostModel, Operator
from flowprefill.execution.collective import LocalBoard, RankGate, RanPastStop
from flowprefill.execution.gate import PreemptionGate
from flowprefill.execution.virtual_clock import VirtualClock

MARK = "collective"


class Collective:
    """Nobody leaves before all have entered; entered again and again, in order."""

    def __init__(self, clock: VirtualClock, num_ranks: int) -> None:
        self._entered = [0] * num_ranks
        self._wakes: list[Signal] = [clock.signal() for _ in range(num_ranks)]

    def enter(self, rank: int) -> None:
        self._entered[rank] += 1
        for wake in self._wakes:
            wake.set()
        while min(self._entered) < self._entered[rank]:
            self._wakes[rank].wait()


class Ranks:
    """Runs one plan on several ranks. `segments` counts the points before each collective, and after the last.

    `steps_s[rank][i]` is how long that rank takes before its point i. The leader is asked to pause at `request_s`
    and goes on, or unwinds, `hold_s` after it parked.
    """

    def __init__(
        self,
        segments: Sequence[int],
        steps_s: Sequence[Sequence[float]],
        *,
        k: int,
        request_s: float,
        hold_s: float = 1.0,
        cancel: bool = False,
    ) -> None:
        self.clock = VirtualClock()
        self.segments = segments
        self.steps_s = steps_s
        self.request_s = request_s
        self.hold_s = hold_s
        self.cancel = cancel
        num_ranks = len(steps_s)
        self.lock = threading.Lock()
        self.paused_at: list[int | None] = [None] * num_ranks
        self.ends: list[str] = ["hangs"] * num_ranks
        self.acknowledged: list[int] = []
        board = LocalBoard(self.clock, num_ranks)
        self.collective = Collective(self.clock, num_ranks)
        self.inner = PreemptionGate(self.lock, self.clock.signal(), self._parked)
        self.resumer = self.clock.signal()
        self.gates = [
            RankGate(board, rank=rank, points_between_collectives=k, inner=None if rank else self.inner)
            for rank in range(num_ranks)
        ]

    def run(self) -> None:
        self.clock.start_thread(self._control, name="control", rank=1)
        assert self.clock.wait_at_rest(30)

    def _parked(self, ticket: int) -> None:
        self.acknowledged.append(ticket)
        self.resumer.set()

    def _control(self) -> None:
        for rank in range(len(self.gates)):  # they begin to run once this thread waits
            self.clock.start_thread(lambda rank=rank: self._rank(rank), name=f"rank-{rank}")
        self.clock.sleep_until_s(self.request_s)
        with self.lock:
            self.inner.request(7)
        self.resumer.wait()
        self.clock.sleep_until_s(self.clock.now_s() + self.hold_s)
        with self.lock:
            if self.cancel:
                self.inner.cancel()
            else:
                self.inner.resume()

    def _rank(self, rank: int) -> None:
        gate = self.gates[rank]
        plan = list(itertools.chain.from_iterable([*range(points), MARK] for points in self.segments))[:-1]
        index = 0
        try:
            for step in plan:
                if step == MARK:
                    self.collective.enter(rank)
                    continue
                self.clock.sleep_until_s(self.clock.now_s() + self.steps_s[rank][index])
                gate.index = index
                if gate.raised:
                    before_s = self.clock.now_s()
                    gate.pause(index)
                    if self.clock.now_s() > before_s:
                        self.paused_at[rank] = index
                index += 1
            self.ends[rank] = "completed"
        except TaskUnwound:
            self.paused_at[rank] = index
            self.ends[rank] = "unwound"
        except RanPastStop:
            self.ends[rank] = "ran past"


@st.composite
def runs(draw: st.DrawFn) -> Ranks:
    segments = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    num_points = sum(segments)
    paces = st.sampled_from([0.0, 0.001, 0.1, 1.0, 7.0])
    num_ranks = draw(st.integers(2, 4))
    steps_s = [draw(st.lists(paces, min_size=num_points, max_size=num_points)) for _ in range(num_ranks)]
    longest_s = max(sum(steps) for steps in steps_s)
    return Ranks(
        segments,
        steps_s,
        k=max(segments),
        request_s=draw(st.floats(0.0, longest_s + 1.0)),
        hold_s=draw(st.sampled_from([0.001, 1.0, 50.0])),
        cancel=draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None)
@given(runs())
def test_ranks_pause_at_one_point_or_not_at_all_and_none_waits_forever(ranks: Ranks) -> None:
    ranks.run()
    assert set(ranks.ends) in ({"completed"}, {"unwound"})
    stopped = {point for point in ranks.paused_at if point is not None}
    if ranks.acknowledged:
        assert ranks.acknowledged == [7]
        assert len(stopped) == 1
        assert None not in ranks.paused_at
        assert set(ranks.ends) == ({"unwound"} if ranks.cancel else {"completed"})
    else:
        assert set(ranks.ends) == {"completed"}


@pytest.mark.parametrize("segments", [(3, 3, 3, 3), (1, 5, 2, 5), (2, 2, 6, 1, 1, 1), (4, 4)])
def test_less_than_the_most_points_between_two_collectives_is_not_enough(segments: Sequence[int]) -> None:
    # The leader is slow at the first point of the longest segment; the other rank has passed all of that segment's
    # points and waits in the collective that ends it.
    k = max(segments)
    first = sum(segments[: segments.index(k)])
    num_points = sum(segments)
    leader = [0.01] * num_points
    leader[first] = 100.0
    for used in (k, k - 1):
        ranks = Ranks(segments, [leader, [0.01] * num_points], k=used, request_s=50.0)
        ranks.run()
        assert (ranks.ends == ["completed", "completed"]) == (used == k)
        assert ("ran past" in ranks.ends) == (used < k)


def test_a_plan_knows_its_most_points_between_two_collectives() -> None:
    operators = (
        Operator(name="qkv", share=0.2),
        Operator(name="attention", attention=True),
        Operator(name="o", share=0.1, collective=True),
        Operator(name="gate_up", share=0.5),
        Operator(name="down", share=0.2, collective=True),
    )
    cost = CostModel(
        name="split",
        num_layers=3,
        operators=operators,
        fixed_s=0.0,
        linear_s=3.0,
        quadratic_s=0.0,
        tensor_parallel_size=2,
    )
    # 1,000 tokens: per layer qkv 0.2 s, attention 0, o 0.1 s, gate_up 0.5 s, down 0.2 s; tiles of at most 0.11 s. A point
    # stands before each tile. Between two collectives: (qkv 2, attention 1, o 1) = 4 and (gate_up 5, down 2) = 7.
    assert cost.prefill([(1000, 0)], "operator", 0.11).max_points_between_collectives == 7
    assert cost.prefill([(1000, 0)], "operator", None).max_points_between_collectives == 3
    assert cost.prefill([(1000, 0)], "layer", None).max_points_between_collectives == 1
