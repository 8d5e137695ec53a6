"""How long operators are cut, so that the time between two preemption points stays bounded at any prompt length. Pure.

Linear operators and experts work row by row: a tile is a range of token rows. Attention's work is counted in pairs of a query and a
key that it sees; a tile is a range of query rows with the context that they see, in one request or over several short ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flowprefill.scheduling.predictor import Coefficients

LEAST_ROWS = 16
"""A tile has so many rows at least: below, cutting costs more than it gives."""

LARGEST_SHARE = 0.5
"""Of a layer's time without attention, what its largest operator takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileLimits:
    """The most that one tile may hold: token rows of a linear operator, (query, key) pairs of attention."""

    rows: int
    attention_pairs: int

    def __post_init__(self) -> None:
        if self.rows < LEAST_ROWS:
            raise ValueError(f"rows is {self.rows}; accepted are integers from {LEAST_ROWS}")
        if self.attention_pairs < 1:
            raise ValueError(f"attention_pairs is {self.attention_pairs}; accepted are integers from 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Rows `[start, end)` of the packed batch, of the request with this index; the last of them sees `seq_len` tokens."""

    request: int
    start: int
    end: int
    seq_len: int


def limits_for(
    coefficients: Coefficients, *, num_layers: int, max_gap_s: float, rows: int | None = None
) -> TileLimits:
    """Limits under which one operator takes about `max_gap_s`, by measured prefill times.

    One pass takes `b n + c n^2` seconds for n new tokens: b is shared by the layers' linear operators, c by attention's n^2 / 2 pairs a
    layer. A c that was too small to be measured leaves attention with as many pairs as `rows` of them would see at 16 times their number.
    """
    _, b, c, _ = coefficients
    if rows is None:
        rows = int(max_gap_s * num_layers / (LARGEST_SHARE * b)) if b > 0 else 1 << 20
    rows = min(max(rows, LEAST_ROWS), 1 << 20)
    pairs = int(max_gap_s * num_layers / (2 * c)) if c > 0 else rows * rows * 16
    return TileLimits(rows=rows, attention_pairs=min(max(pairs, LEAST_ROWS), rows * rows * 16))


def row_tiles(num_rows: int, limits: TileLimits) -> list[tuple[int, int]]:
    """Ranges of rows, in order, as equal as can be."""
    count = max(-(-num_rows // limits.rows), 1)
    size = -(-num_rows // count)
    return [(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def attention_tiles(batch: Sequence[tuple[int, int]], limits: TileLimits) -> list[tuple[Segment, ...]]:
    """Tiles that cover the batch's rows in order. `batch` gives each request's (new tokens, tokens in all)."""
    tiles: list[tuple[Segment, ...]] = []
    tile: list[Segment] = []
    room = limits.attention_pairs
    row = 0
    for request, (num_new, seq_len) in enumerate(batch):
        done = 0
        while done < num_new:
            seen = seq_len - num_new + done  # what the next row sees, itself not counted
            count = min(max(_rows_within(room, seen), 0), num_new - done)
            if count < min(LEAST_ROWS, num_new - done):
                if tile:
                    tiles.append(tuple(tile))
                    tile, room = [], limits.attention_pairs
                    continue
                count = min(LEAST_ROWS, num_new - done)
            end = done + count
            tile.append(Segment(request=request, start=row + done, end=row + end, seq_len=seen + count))
            room -= _pairs(count, seen)
            done = end
        row += num_new
    if tile:
        tiles.append(tuple(tile))
    return tiles


def _pairs(count: int, seen: int) -> int:
    return count * seen + count * (count + 1) // 2


def _rows_within(pairs: int, seen: int) -> int:
    """The most rows of which the first sees `seen` tokens before it, with no more than so many pairs."""
    if pairs <= 0:
        return 0
    middle = seen + 0.5
    return int(math.sqrt(middle * middle + 2 * pairs) - middle)
