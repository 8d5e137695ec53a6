"""A batch made ready to run: tiles, attention units, the number of points and the work before each. Pure.

The points of a forward, in order:

1. at the start of every tile of every decoder layer;
2. before and after every `nn.Linear` of the layer;
3. before attention and after each of its units; before the experts and after each of their groups;
4. before and after each piece of the language model head, when any row is sampled.

With `layer` granularity only the first tile's start of every layer is a point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flowprefill.engines.protocol import DecodeSequence, PrefillItem
from flowprefill.engines.torch_engine.costs import Costs
from flowprefill.engines.torch_engine.layout import (
    ItemShape,
    Tile,
    Tiles,
    Unit,
    cut_tiles,
    cut_units,
    expert_groups,
    head_pieces,
    num_keys,
)
from flowprefill.engines.torch_engine.trace import LayerTrace, ModelTrace, Op
from flowprefill.scheduling.actions import Granularity

TileUnits = tuple[tuple[Unit, ...], ...]
"""Attention units of one tile, per segment."""


@dataclass(kw_only=True)
class TorchPlan:
    """What `TorchEngine.run` runs. Everything below is computed from the batch, the tile sizes and the model's trace."""

    items: Sequence[PrefillItem | DecodeSequence]
    shapes: tuple[ItemShape, ...]
    granularity: Granularity
    limits: Tiles
    trace: ModelTrace
    costs: Costs

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        return cut_tiles(self.shapes, self.limits)

    @cached_property
    def units(self) -> Mapping[int | None, tuple[TileUnits, ...]]:
        """Attention units per sliding window that occurs in the model, per tile."""
        return {
            window: tuple(
                tuple(
                    cut_units(
                        segment,
                        num_kv_heads=self.trace.num_kv_heads,
                        group_size=self.trace.group_size,
                        window=window,
                        limit=self.limits.attention_pairs,
                    )
                    for segment in tile.segments
                )
                for tile in self.tiles
            )
            for window in {layer.window for layer in self.trace.layers}
        }

    @property
    def num_sampled(self) -> int:
        return sum(shape.sample for shape in self.shapes)

    @cached_property
    def num_points(self) -> int:
        if self.granularity == "layer":
            return len(self.trace.layers)
        per_layer = {
            layer: sum(len(self._tile_points(layer, tile)) for tile in range(len(self.tiles)))
            for layer in set(self.trace.layers)
        }
        return sum(per_layer[layer] for layer in self.trace.layers) + self._tail_points

    @cached_property
    def max_points_between_collectives(self) -> int:
        """Computed from the model's own tensor parallel plan; all points when it names no collective."""
        if self.granularity == "layer":
            return 1
        run = longest = 0
        for layer in self.trace.layers:
            for tile in range(len(self.tiles)):
                run += 1
                for op in layer.ops:
                    run += self._op_points(op, tile)
                    if op.reduces:
                        longest, run = max(longest, run), 0
        return max(longest, run + self._tail_points, 1)

    def work_done(self, index: int) -> float:
        """Fraction of the predicted time that lies before point `index`."""
        work = self._work
        return float(work[min(max(index, 0), len(work) - 1)])

    @cached_property
    def _work(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Share of work before each point, [num_points]."""
        rows = sum(shape.num_rows for shape in self.shapes)
        layers = {
            layer: [self._tile_points(layer, tile) for tile in range(len(self.tiles))]
            for layer in set(self.trace.layers)
        }
        before: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []
        carried_s = self.costs.begin.at(rows)
        for layer in self.trace.layers:
            layer_s = 0.0
            for tile, gaps in enumerate(layers[layer]):
                steps = np.asarray(gaps)
                end_s = self.costs.layers[layer].end.at(self.tiles[tile].num_rows)
                if self.granularity == "layer":
                    layer_s += float(steps.sum()) + end_s
                    continue
                steps[0] += carried_s
                before.append(steps)
                carried_s = end_s
            if self.granularity == "layer":
                before.append(np.asarray([carried_s]))
                carried_s = layer_s
        sampled = self.num_sampled
        if sampled:
            tail = self._tail_gaps
            if self.granularity == "layer":
                carried_s += sum(tail)
            elif len(tail) > 1:
                before.append(np.asarray([carried_s + tail[0], *tail[1:-1]]))  # without a head: nothing
                carried_s = tail[-1]
        reached = np.cumsum(np.concatenate(before))
        share: np.ndarray[tuple[int], np.dtype[np.float64]] = reached / (reached[-1] + carried_s)
        return share

    @property
    def _tail_points(self) -> int:
        return 2 * len(self.trace.tail) * len(self._head_pieces)

    @cached_property
    def _head_pieces(self) -> tuple[tuple[int, int], ...]:
        return head_pieces(self.num_sampled, self.limits.head_rows) if self.num_sampled else ()

    @property
    def _tail_gaps(self) -> list[float]:
        """Seconds before each point of the tail, and after its last one."""
        gaps: list[float] = []
        *lines, end = self.costs.tail
        for lead, op in zip(lines[::2], lines[1::2], strict=True):
            for first, last in self._head_pieces:
                gaps += [0.0 if first else lead.at(self.num_sampled), op.at(last - first)]
        return [*gaps, end.at(self.num_sampled)]

    def _op_points(self, op: Op, tile: int) -> int:
        match op.kind:
            case "linear":
                return 2
            case "attention":
                return 1 + sum(len(units) for units in self.units[op.window][tile])
            case "experts":
                return 1 + len(self.groups(op.num_experts, self.tiles[tile].num_rows * op.top_k))

    def groups(self, num_experts: int, num_pairs: int) -> tuple[tuple[int, int], ...]:
        """Groups of experts for a tile with `num_pairs` (token, expert) pairs."""
        return expert_groups(num_experts, num_pairs, self.limits.expert_rows)

    def _tile_points(self, layer: LayerTrace, tile: int) -> list[float]:
        """Seconds between each point of a layer's tile and the point before it; the first is the tile's start."""
        rows = self.tiles[tile].num_rows
        costs = self.costs.layers[layer]
        gaps = [0.0]
        for op, lead, cost in zip(layer.ops, costs.leads, costs.ops, strict=True):
            gaps.append(lead.at(rows))
            match op.kind:
                case "linear":
                    gaps.append(cost.at(rows))
                case "attention":
                    start_s = costs.attention_start.at(rows)
                    first = len(gaps)
                    segments = self.tiles[tile].segments
                    for segment, units in zip(segments, self.units[op.window][tile], strict=True):
                        gaps += [
                            cost.at(
                                (unit.row1 - unit.row0)
                                * num_keys(segment, unit.row1, op.window)
                                * (unit.head1 - unit.head0)
                                * self.trace.group_size
                            )
                            for unit in units
                        ]
                    gaps[first] += start_s
                case "experts":
                    groups = self.groups(op.num_experts, rows * op.top_k)
                    gaps += [cost.at(rows * (last - first) / op.num_experts) for first, last in groups]
        return gaps
