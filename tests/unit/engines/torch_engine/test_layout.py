"""Tiles, attention units and expert groups: everything once, nothing above its limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowprefill.engines.torch_engine.layout import (
    ItemShape,
    Segment,
    Tiles,
    cut_tiles,
    cut_units,
    expert_groups,
    head_pieces,
    num_keys,
)

ITEMS = st.lists(
    st.builds(ItemShape, start=st.integers(0, 300), num_rows=st.integers(1, 200), sample=st.booleans()),
    min_size=1,
    max_size=6,
)
LIMITS = st.one_of(st.none(), st.integers(1, 250))


@given(items=ITEMS, rows=LIMITS)
def test_every_row_of_every_item_is_in_one_tile_at_its_position(
    items: list[ItemShape], rows: int | None
) -> None:
    expected = [(n, item.start + k) for n, item in enumerate(items) for k in range(item.num_rows)]
    seen: list[tuple[int, int]] = []
    for tile in cut_tiles(items, Tiles(rows=rows)):
        assert tile.start == len(seen)
        for segment in tile.segments:
            assert segment.row0 == len(seen) - tile.start
            seen += [(segment.item, segment.position + k) for k in range(segment.num_rows)]
        assert tile.end == len(seen)
    assert seen == expected


@given(items=ITEMS, rows=st.integers(1, 250))
def test_no_tile_is_higher_than_the_limit_and_none_is_needlessly_low(
    items: list[ItemShape], rows: int
) -> None:
    tiles = cut_tiles(items, Tiles(rows=rows))
    total = sum(item.num_rows for item in items)
    assert max(tile.num_rows for tile in tiles) <= rows
    assert len(tiles) <= -(-total // rows)  # as few tiles as the limit allows


@given(items=ITEMS, rows=st.integers(1, 250))
def test_a_segment_knows_whether_its_item_continues_in_another_tile(
    items: list[ItemShape], rows: int
) -> None:
    tiles = cut_tiles(items, Tiles(rows=rows))
    places = [segment.item for tile in tiles for segment in tile.segments]
    for tile in tiles:
        for segment in tile.segments:
            assert segment.spans_tiles == (places.count(segment.item) > 1)


@given(
    rows=st.integers(1, 700),
    position=st.integers(0, 5000),
    heads=st.integers(1, 9),
    group=st.integers(1, 4),
    window=st.one_of(st.none(), st.integers(1, 600)),
    limit=st.one_of(st.none(), st.integers(1, 3_000_000)),
)
def test_units_cover_each_row_and_head_once_within_the_limit(
    rows: int, position: int, heads: int, group: int, window: int | None, limit: int | None
) -> None:
    segment = Segment(item=0, row0=3, row1=3 + rows, position=position, spans_tiles=True)
    units = cut_units(segment, num_kv_heads=heads, group_size=group, window=window, limit=limit)
    area = 0
    for unit in units:
        width, height = unit.head1 - unit.head0, unit.row1 - unit.row0
        assert width > 0
        assert height > 0
        area += width * height
        if limit is not None and (width > 1 or height > 1):
            assert width * height * group * num_keys(segment, unit.row1, window) <= max(
                limit, 1 * group * num_keys(segment, unit.row1, window)
            )
    assert area == rows * heads  # with no overlap, checked next, this is a cover
    corners = {(unit.head0, unit.row0) for unit in units}
    assert len(corners) == len(units)


@pytest.mark.parametrize(
    ("experts", "pairs", "limit", "groups"),
    [
        (8, 64, None, ((0, 8),)),
        (8, 64, 64, ((0, 8),)),
        (8, 64, 32, ((0, 4), (4, 8))),
        (8, 64, 1, tuple((n, n + 1) for n in range(8))),
        (6, 70, 20, ((0, 2), (2, 4), (4, 6))),
        (5, 10, 4, ((0, 2), (2, 4), (4, 5))),
    ],
)
def test_experts_are_grouped_by_how_many_rows_they_may_expect(
    experts: int, pairs: int, limit: int | None, groups: tuple[tuple[int, int], ...]
) -> None:
    assert expert_groups(experts, pairs, limit) == groups


@pytest.mark.parametrize(
    ("rows", "limit", "pieces"),
    [(5, None, ((0, 5),)), (5, 5, ((0, 5),)), (5, 2, ((0, 2), (2, 4), (4, 5))), (1, 3, ((0, 1),))],
)
def test_sampled_rows_go_through_the_head_in_pieces(
    rows: int, limit: int | None, pieces: tuple[tuple[int, int], ...]
) -> None:
    assert head_pieces(rows, limit) == pieces


@pytest.mark.parametrize("name", ["rows", "attention_pairs", "expert_rows", "head_rows"])
def test_a_limit_below_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Tiles(**{name: 0})
