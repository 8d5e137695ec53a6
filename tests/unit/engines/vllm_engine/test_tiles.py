"""Tiles cover a batch, in order, and none holds more than it may."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowprefill.engines.vllm_engine.tiles import (
    LEAST_ROWS,
    TileLimits,
    attention_tiles,
    limits_for,
    row_tiles,
)

batches = st.lists(
    st.tuples(st.integers(1, 3000), st.integers(0, 3000)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(batches, st.integers(1, 2_000_000))
def test_attention_tiles_cover_all_rows_in_order_with_what_each_sees(
    batch: list[tuple[int, int]], pairs: int
) -> None:
    tiles = attention_tiles(batch, TileLimits(rows=LEAST_ROWS, attention_pairs=pairs))
    rows = [
        (segment.request, row, segment.seq_len - (segment.end - 1 - row))
        for tile in tiles
        for segment in tile
        for row in range(segment.start, segment.end)
    ]
    expected = []
    first = 0
    for request, (num_new, seq_len) in enumerate(batch):
        expected += [(request, first + i, seq_len - num_new + i + 1) for i in range(num_new)]
        first += num_new
    assert rows == expected, "every row once, in order, and it sees itself and all before it"


@settings(deadline=None)
@given(batches, st.integers(1, 2_000_000))
def test_no_tile_has_more_pairs_than_allowed_but_one_of_least_rows(
    batch: list[tuple[int, int]], pairs: int
) -> None:
    for tile in attention_tiles(batch, TileLimits(rows=LEAST_ROWS, attention_pairs=pairs)):
        seen = sum(
            segment.seq_len - (segment.end - 1 - row)
            for segment in tile
            for row in range(segment.start, segment.end)
        )
        num_rows = sum(segment.end - segment.start for segment in tile)
        assert seen <= pairs or (len(tile) == 1 and num_rows <= LEAST_ROWS)


def test_short_requests_share_a_tile_and_a_long_one_is_cut() -> None:
    tiles = attention_tiles([(10, 10), (10, 10), (400, 400)], TileLimits(rows=64, attention_pairs=20_000))
    assert [segment.request for segment in tiles[0]] == [0, 1, 2]
    assert len(tiles) > 3


@settings(deadline=None)
@given(st.integers(1, 20_000), st.integers(LEAST_ROWS, 5000))
def test_row_tiles_cover_all_rows_and_are_alike(num_rows: int, most: int) -> None:
    tiles = row_tiles(num_rows, TileLimits(rows=most, attention_pairs=1))
    assert [row for start, end in tiles for row in range(start, end)] == list(range(num_rows))
    assert max(end - start for start, end in tiles) <= most
    assert len(tiles) <= -(-num_rows // most)


def test_limits_follow_measured_times() -> None:
    # 24 layers; 1 ms a token without attention: 42 us a layer and token, half of it in the largest operator.
    # 1 us n^2 of attention: in a layer 83 ns a pair.
    limits = limits_for((0.0, 1e-3, 1e-6, 0.0), num_layers=24, max_gap_s=0.02)
    assert limits.rows == 960
    assert limits.attention_pairs == 240_000
    assert limits_for((0.0, 1e-3, 1e-6, 0.0), num_layers=24, max_gap_s=0.02, rows=128).rows == 128


def test_attention_too_quick_to_be_measured_is_cut_all_the_same() -> None:
    limits = limits_for((0.0, 1e-3, 0.0, 0.0), num_layers=24, max_gap_s=0.02)
    assert limits.attention_pairs == 16 * limits.rows**2


@pytest.mark.parametrize(("rows", "pairs"), [(LEAST_ROWS - 1, 10), (64, 0)])
def test_limits_that_cut_to_nothing_are_refused(rows: int, pairs: int) -> None:
    with pytest.raises(ValueError, match="accepted"):
        TileLimits(rows=rows, attention_pairs=pairs)
