"""Which rows of a packed batch run together, and in which pieces attention is computed. Pure.

    T    packed token rows of all items, in item order
    tile rows `[start, end)` that go through a decoder layer together
    segment  the rows of one item inside one tile
    unit one attention call's share of a segment: key-value heads `[head0, head1)`, rows `[row0, row1)`

Tiling a *layer* by rows is exact: in a causal model a layer's output at a row depends on the layer's input at
that row and on keys and values of earlier rows, which the earlier tiles have left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HEAD_ROWS = 512
"""From this many rows on, attention is one kernel call per key-value head, so a point stands between any two."""

ROW_MULTIPLE = 32
"""Tile heights are multiples of this where they can be: GEMM kernels like round heights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Largest pieces that run between two preemption points; None does not cut.

    `rows` bounds the token rows of a layer tile, `attention_pairs` the (query row, key, query head) triples of
    one attention unit, `expert_rows` the (token, expert) pairs expected in one group of experts, `head_rows` the
    sampled rows of one piece of the language model head.
    """

    rows: int | None = None
    attention_pairs: int | None = None
    expert_rows: int | None = None
    head_rows: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "attention_pairs", "expert_rows", "head_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; accepted are integers from 1, or None for no limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemShape:
    """One item's place in the packed batch: `num_rows` rows whose first is at position `start`."""

    start: int
    num_rows: int
    sample: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Rows `[row0, row1)` of a tile that belong to item `item`; the first is at `position`."""

    item: int
    row0: int
    row1: int
    position: int
    spans_tiles: bool

    @property
    def num_rows(self) -> int:
        return self.row1 - self.row0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Packed rows `[start, end)`; segments are relative to `start`."""

    start: int
    end: int
    segments: tuple[Segment, ...]

    @property
    def num_rows(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One attention call: key-value heads `[head0, head1)` and rows `[row0, row1)` of a segment."""

    head0: int
    head1: int
    row0: int
    row1: int


def cut_tiles(items: Sequence[ItemShape], tiles: Tiles) -> tuple[Tile, ...]:
    """Cut the packed rows into tiles of about equal height, at most `tiles.rows` each."""
    total = sum(item.num_rows for item in items)
    height = _even_height(total, tiles.rows)
    bounds = [(start, min(start + height, total)) for start in range(0, total, height)]
    result: list[Tile] = []
    segments: list[Segment] = []
    tile = 0
    first = 0
    for index, item in enumerate(items):
        last = first + item.num_rows
        row = first
        while row < last:
            start, end = bounds[tile]
            upto = min(end, last)
            segments.append(
                Segment(
                    item=index,
                    row0=row - start,
                    row1=upto - start,
                    position=item.start + row - first,
                    spans_tiles=not (start <= first and last <= end),
                )
            )
            row = upto
            if row == end:
                result.append(Tile(start=start, end=end, segments=tuple(segments)))
                segments = []
                tile += 1
        first = last
    return tuple(result)


def _even_height(total: int, limit: int | None) -> int:
    if limit is None or total <= limit:
        return total
    count = -(-total // limit)
    even = -(-total // count)
    rounded = -(-even // ROW_MULTIPLE) * ROW_MULTIPLE
    return rounded if rounded <= limit else even


def num_keys(segment: Segment, row1: int, window: int | None) -> int:
    """Keys that rows up to `row1` of a segment read: all earlier positions, or those in the window."""
    keys = segment.position + row1
    return keys if window is None else min(keys, window + row1)


def cut_units(
    segment: Segment, *, num_kv_heads: int, group_size: int, window: int | None, limit: int | None
) -> tuple[Unit, ...]:
    """Cut one segment's attention into units of at most `limit` (row, key, query head) triples.

    Heads are cut before rows: fewer heads cost nothing, fewer rows make the kernel less efficient. A unit has
    at least one key-value head and one row, and one head alone when its rows are many. `group_size` is query
    heads per key-value head.
    """
    rows = segment.num_rows
    keys = num_keys(segment, rows, window)
    heads = num_kv_heads if rows < HEAD_ROWS else 1
    if limit is not None and rows * keys * heads * group_size > limit:
        heads = min(heads, max(1, limit // (rows * keys * group_size)))
        if heads == 1 and rows * keys * group_size > limit:
            rows = max(1, limit // (keys * group_size))
            if rows > ROW_MULTIPLE:
                rows -= rows % ROW_MULTIPLE
    heads = -(-num_kv_heads // -(-num_kv_heads // heads))
    return tuple(
        Unit(
            head0=head,
            head1=min(head + heads, num_kv_heads),
            row0=row,
            row1=min(row + rows, segment.num_rows),
        )
        for row in range(0, segment.num_rows, rows)
        for head in range(0, num_kv_heads, heads)
    )


def head_pieces(num_rows: int, limit: int | None) -> tuple[tuple[int, int], ...]:
    """Cut the sampled rows for the language model head into pieces of at most `limit` rows."""
    step = num_rows if limit is None else limit
    return tuple((first, min(first + step, num_rows)) for first in range(0, num_rows, step))


def expert_groups(num_experts: int, num_pairs: int, limit: int | None) -> tuple[tuple[int, int], ...]:
    """Cut experts `[0, num_experts)` into groups that expect at most `limit` (token, expert) pairs each.

    The number of groups depends on the batch's size alone, never on the routing, so that point indices repeat.
    """
    if limit is None:
        return ((0, num_experts),)
    groups = min(num_experts, max(1, -(-num_pairs // limit)))
    size = -(-num_experts // groups)
    return tuple((first, min(first + size, num_experts)) for first in range(0, num_experts, size))
