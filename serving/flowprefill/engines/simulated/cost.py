"""Prefill time as a cost model: how long a batch takes, and where in it the preemption points lie.

A pass over items of n_i new and p_i cached tokens (in thousands, k) takes

    a  +  b * sum(n_i)  +  c * sum(n_i^2 + 2 n_i p_i)        seconds

`a` is paid once a pass (reading the weights, launching), b covers the matrix products, c attention: a query at
position x looks at x keys, so n new tokens after p cached ones cost n (p + n/2), half of the bracket.

`a` is spread evenly over all operators and the head; b over the matrix products by their share of the FLOPs; c falls on
attention alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from flowprefill.engines.simulated.timetable import Timetable
from flowprefill.scheduling.actions import Granularity

K = 1000.0
"""Coefficients are per thousand tokens, as in the published fits."""

Shape = tuple[int, int]
"""New and cached tokens of one item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One core operator of a layer.

    `share` is its part of `b` (0 for attention, which has all of c). `collective` says that it ends in a
    collective, or is one, when the model is split over several devices.
    """

    name: str
    share: float = 0.0
    attention: bool = False
    collective: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """One model on one kind of device. Seconds, and seconds per thousand tokens.

    `kv_read_s` is the time to read the KV of a thousand tokens once, which bounds a decode step's attention.
    """

    name: str
    num_layers: int
    operators: tuple[Operator, ...]
    fixed_s: float
    linear_s: float
    quadratic_s: float
    kv_read_s: float = 0.0
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        assert math.isclose(sum(operator.share for operator in self.operators), 1.0, abs_tol=1e-9)
        assert sum(operator.attention for operator in self.operators) == 1, (
            "a layer has one attention operator"
        )

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """(a, b, c, d) of `a + b n + c n^2 + d n p` seconds for n new and p cached tokens: a perfect prediction."""
        return (self.fixed_s, self.linear_s / K, self.quadratic_s / K**2, 2.0 * self.quadratic_s / K**2)

    def prefill_s(self, shapes: Iterable[Shape]) -> float:
        """Time of one pass over these items, packed."""
        new_k, attention = self._load(shapes)
        return self.fixed_s + self.linear_s * new_k + self.quadratic_s * attention

    def prefill(
        self, shapes: Iterable[Shape], granularity: Granularity, max_gap_s: float | None
    ) -> Timetable:
        """The pass's points. With granularity `operator` no gap between two exceeds `max_gap_s` (None: untiled)."""
        new_k, attention = self._load(shapes)
        return self._timetable(self.linear_s * new_k, self.quadratic_s * attention, granularity, max_gap_s)

    def decode(self, num_cached: Sequence[int], max_gap_s: float | None) -> Timetable:
        """One decode step over sequences with this many tokens of KV each."""
        reads_s = self.kv_read_s * sum(num_cached) / K
        return self._timetable(self.linear_s * len(num_cached) / K, reads_s, "operator", max_gap_s)

    def scaled(self, factor: float) -> CostModel:
        """The same model on a device that takes `factor` times as long."""
        return replace(
            self,
            name=f"{self.name} x {factor:g}",
            fixed_s=self.fixed_s * factor,
            linear_s=self.linear_s * factor,
            quadratic_s=self.quadratic_s * factor,
            kv_read_s=self.kv_read_s * factor,
        )

    def operator_s(self, shapes: Iterable[Shape]) -> dict[str, float]:
        """Time of each operator in one layer, by name."""
        new_k, attention = self._load(shapes)
        return dict(self._operators(self.linear_s * new_k, self.quadratic_s * attention))

    def _load(self, shapes: Iterable[Shape]) -> tuple[float, float]:
        new_k = attention = 0.0
        for new, cached in shapes:
            new_k += new / K
            attention += (new / K) ** 2 + 2.0 * (new / K) * (cached / K)
        return new_k, attention

    def _operators(self, linear_s: float, attention_s: float) -> list[tuple[str, float]]:
        each_s = self.fixed_s / (self.num_layers * len(self.operators) + 1)
        times = []
        for operator in self.operators:
            work_s = attention_s if operator.attention else operator.share * linear_s
            times.append((operator.name, each_s + work_s / self.num_layers))
        return times

    def _timetable(
        self, linear_s: float, attention_s: float, granularity: Granularity, max_gap_s: float | None
    ) -> Timetable:
        tail_s = self.fixed_s / (self.num_layers * len(self.operators) + 1)
        offsets = [0.0]
        collectives = []  # how many of the layer's points lie before each collective
        for operator, (_, operator_s) in zip(
            self.operators, self._operators(linear_s, attention_s), strict=True
        ):
            begin_s = offsets[-1]
            tiles = 1
            if granularity == "operator" and max_gap_s is not None:
                tiles = max(math.ceil(operator_s / max_gap_s), 1)
            offsets.extend(begin_s + operator_s * tile / tiles for tile in range(1, tiles + 1))
            if operator.collective and self.tensor_parallel_size > 1:
                collectives.append(len(offsets) - 1)
        layer_s = offsets.pop()
        if granularity == "layer":
            offsets = [0.0]
            collectives = [1] if collectives else []
        return Timetable(
            point_offsets_s=tuple(offsets),
            layer_s=layer_s,
            num_layers=self.num_layers,
            tail_s=tail_s,
            max_points_between_collectives=_most_between(collectives, len(offsets)),
        )


def _most_between(collectives: Sequence[int], num_points: int) -> int:
    """The most points between two neighbouring collectives, layer after layer; all of a layer's without any."""
    if not collectives:
        return num_points
    gaps = [after - before for before, after in itertools.pairwise(collectives)]
    return max(*gaps, num_points - collectives[-1] + collectives[0], 1)
