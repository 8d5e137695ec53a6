"""When a simulated pass reaches its preemption points: equal layers, each with the same points, then a tail."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timetable:
    """Points of one pass; implements `engines.protocol.Plan`.

    `point_offsets_s` are the points of a layer, from its begin; the first is 0. The last point of all stands between
    the last layer and the tail (final norm and head), `tail_s` before the end. Point i of the simulated engine and of
    the simulator is `offset_s(i)`, computed by this one expression, so that both reach it at the same instant.
    """

    point_offsets_s: tuple[float, ...]
    layer_s: float
    num_layers: int
    tail_s: float
    max_points_between_collectives: int

    def __post_init__(self) -> None:
        assert self.point_offsets_s[0] == 0.0

    @property
    def num_points(self) -> int:
        return self.num_layers * len(self.point_offsets_s) + 1

    @property
    def total_s(self) -> float:
        """Time of the whole pass when nothing interrupts it."""
        return self.num_layers * self.layer_s + self.tail_s

    def offset_s(self, index: int) -> float:
        """Time of the pass before point `index`."""
        layer, point = divmod(index, len(self.point_offsets_s))
        return layer * self.layer_s + self.point_offsets_s[point]

    def work_done(self, index: int) -> float:
        """Fraction of the pass before point `index`."""
        return self.offset_s(index) / self.total_s if self.total_s > 0 else 1.0

    def last_point(self, offset_s: float) -> int:
        """A point near `offset_s`: the last one at or before it, give or take rounding."""
        if self.layer_s <= 0:
            return 0
        layer = min(int(offset_s / self.layer_s), self.num_layers)
        if layer == self.num_layers:
            return self.num_points - 1
        within_s = offset_s - layer * self.layer_s
        return layer * len(self.point_offsets_s) + bisect_right(self.point_offsets_s, within_s) - 1
