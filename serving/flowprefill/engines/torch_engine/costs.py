"""Seconds per operator: what the share of work before a point, and the tile sizes, are computed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowprefill.engines.torch_engine.layout import ROW_MULTIPLE, Tiles
from flowprefill.engines.torch_engine.trace import LayerTrace, ModelTrace

MIN_ROWS = 16
MAX_ROWS = 1024
TILE_SHARE = 0.6
"""A tile is sized to this share of the allowed gap: machines are slower at times than when measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Seconds of something as a line in its size."""

    fixed_s: float
    per_unit_s: float

    def at(self, size: float) -> float:
        return self.fixed_s + self.per_unit_s * size


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Costs of one kind of layer: what leads to each operator, the operator itself, and what ends the layer.

    All are lines in token rows, except that attention's own entry is a line in (row, key, query head) triples per
    unit. `attention_start` is paid once a tile: keys and values are stored.
    """

    leads: tuple[Line, ...]
    ops: tuple[Line, ...]
    end: Line
    attention_start: Line = Line(fixed_s=0.0, per_unit_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of a whole forward. `begin` is in token rows, `tail` in sampled rows (per tail operator: lead, operator)."""

    begin: Line
    layers: Mapping[LayerTrace, LayerCosts] = field(hash=False)
    tail: tuple[Line, ...]
    measured: bool


def from_flops(trace: ModelTrace, flops_per_s: float) -> Costs:
    """Costs by counting multiplications and additions; used until a measurement replaces them."""
    per_flop = 1.0 / flops_per_s
    light = Line(fixed_s=20e-6, per_unit_s=1e-7)
    layers = {
        layer: LayerCosts(
            leads=tuple(light for _ in layer.ops),
            ops=tuple(
                Line(fixed_s=20e-6, per_unit_s=4 * trace.head_dim * per_flop)
                if op.kind == "attention"
                else Line(fixed_s=20e-6, per_unit_s=op.flops_per_row * per_flop)
                for op in layer.ops
            ),
            end=light,
        )
        for layer in set(trace.layers)
    }
    tail: list[Line] = []
    for op in trace.tail:
        tail += [light, Line(fixed_s=20e-6, per_unit_s=op.flops_per_row * per_flop)]
    return Costs(begin=light, layers=layers, tail=(*tail, light), measured=False)


def choose_tiles(trace: ModelTrace, costs: Costs, max_gap_s: float | None) -> Tiles:
    """The largest tiles whose pieces stay well within `max_gap_s`; None never cuts."""
    if max_gap_s is None:
        return Tiles()
    bound_s = TILE_SHARE * max_gap_s
    rows = float(MAX_ROWS)
    pairs = float(2**62)
    expert_rows: float | None = None
    for layer, cost in costs.layers.items():
        lines = [*cost.leads, cost.end]
        for op, line in zip(layer.ops, cost.ops, strict=True):
            if op.kind == "attention":
                pairs = min(pairs, _largest(line, bound_s))
            elif op.kind == "experts":
                per_pair = Line(fixed_s=line.fixed_s, per_unit_s=line.per_unit_s / max(op.top_k, 1))
                limit = _largest(per_pair, bound_s)
                expert_rows = limit if expert_rows is None else min(expert_rows, limit)
            else:
                lines.append(line)
        rows = min(rows, *(_largest(line, bound_s) for line in lines))
    head_rows = min((_largest(line, bound_s) for line in costs.tail[1::2]), default=None)
    height = max(MIN_ROWS, int(rows))
    if height > ROW_MULTIPLE:
        height -= height % ROW_MULTIPLE
    return Tiles(
        rows=height,
        attention_pairs=max(1, int(pairs)),
        expert_rows=None if expert_rows is None else max(1, int(expert_rows)),
        head_rows=None if head_rows is None else max(1, int(head_rows)),
    )


def _largest(line: Line, bound_s: float) -> float:
    if line.per_unit_s <= 0:
        return float(2**62)
    return max(1.0, (bound_s - line.fixed_s) / line.per_unit_s)
