"""Points and shares of work, worked by hand for a model of two layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowprefill.engines.protocol import PrefillItem
from flowprefill.engines.torch_engine.costs import (
    TILE_SHARE,
    Costs,
    LayerCosts,
    Line,
    choose_tiles,
    from_flops,
)
from flowprefill.engines.torch_engine.layout import ItemShape, Tiles
from flowprefill.engines.torch_engine.plan import TorchPlan
from flowprefill.engines.torch_engine.trace import LayerTrace, ModelTrace, Op
from flowprefill.scheduling.actions import Granularity

LINEAR = Op(kind="linear", flops_per_row=100)
LAYER = LayerTrace(ops=(LINEAR, Op(kind="attention"), Op(kind="linear", flops_per_row=100, reduces=True)))
TRACE = ModelTrace(layers=(LAYER, LAYER), tail=(LINEAR,), num_kv_heads=2, group_size=2, head_dim=4)
FREE = Line(fixed_s=0.0, per_unit_s=0.0)
SECOND = Line(fixed_s=1.0, per_unit_s=0.0)
COSTS = Costs(
    begin=SECOND,
    layers={
        LAYER: LayerCosts(
            leads=(FREE, FREE, FREE), ops=(SECOND, Line(fixed_s=0.0, per_unit_s=1e-3), SECOND), end=SECOND
        )
    },
    tail=(FREE, SECOND, FREE),
    measured=True,
)


def plan(
    num_rows: int,
    *,
    start: int = 0,
    sample: bool = True,
    limits: Tiles | None = None,
    granularity: Granularity = "operator",
    costs: Costs = COSTS,
    trace: ModelTrace = TRACE,
) -> TorchPlan:
    item = PrefillItem(
        request_id="r", token_ids=[0] * num_rows, start=start, block_ids=range(100), sample=sample
    )
    shape = ItemShape(start=start, num_rows=num_rows, sample=sample)
    return TorchPlan(
        items=[item],
        shapes=(shape,),
        granularity=granularity,
        limits=limits or Tiles(),
        trace=trace,
        costs=costs,
    )


def test_an_uncut_batch_has_the_points_of_its_operators() -> None:
    # Per layer: start, linear 2, attention 1 + 1 unit, linear 2; then the head's 2.
    assert plan(10).num_points == 2 * 7 + 2
    assert plan(10, sample=False).num_points == 2 * 7
    assert plan(10, granularity="layer").num_points == 2


def test_tiles_and_units_add_points() -> None:
    # 2 tiles of 32 rows. Attention reads 32 then 64 keys: 32 * 32 * 4 = 4096 triples are one unit, 8192 are two.
    cut = plan(64, limits=Tiles(rows=32, attention_pairs=4096))
    assert cut.num_points == 2 * (7 + 8) + 2


def test_the_share_of_work_before_each_point() -> None:
    # Seconds: begin 1; layer: linear 1, attention 10 * 10 * 4 / 1000 = 0.4, linear 1, end 1; head 1. In all 8.8.
    seconds = [1, 1, 2, 2, 2.4, 2.4, 3.4, 4.4, 4.4, 5.4, 5.4, 5.8, 5.8, 6.8, 7.8, 8.8]
    done = plan(10)
    assert [done.work_done(index) for index in range(done.num_points)] == pytest.approx(
        [second / 8.8 for second in seconds]
    )
    coarse = plan(10, granularity="layer")
    assert [coarse.work_done(index) for index in range(2)] == pytest.approx([1 / 8.8, 4.4 / 8.8])


def test_a_cached_prefix_makes_attention_dearer() -> None:
    # 10 rows over 110 keys: 4.4 s of attention a layer.
    late = plan(10, start=100)
    before, after = late.work_done(3), late.work_done(4)
    assert after - before == pytest.approx(4.4 / (8.8 + 8.0))


def test_a_head_over_many_rows_is_cut_and_each_piece_costs_its_rows() -> None:
    shapes = tuple(ItemShape(start=0, num_rows=1, sample=True) for _ in range(5))
    costs = Costs(
        begin=FREE, layers=COSTS.layers, tail=(FREE, Line(fixed_s=0.0, per_unit_s=1.0), FREE), measured=True
    )
    items = plan(1).items * 5
    cut = TorchPlan(
        items=items,
        shapes=shapes,
        granularity="operator",
        limits=Tiles(head_rows=2),
        trace=TRACE,
        costs=costs,
    )
    # Per layer: 7 points, four more for the other items' attention; the head is 2 + 2 + 1 rows.
    assert cut.num_points == 2 * (7 + 4) + 6
    # A layer takes 3 s and attention 5 * 4 / 1000 s; the head 5 s.
    total = 2 * 3.02 + 5
    assert [cut.work_done(index) * total for index in range(22, 28)] == pytest.approx(
        [6.04, 8.04, 8.04, 10.04, 10.04, 11.04]
    )


def test_what_a_tile_pays_once_lies_before_its_first_attention_call() -> None:
    layer = replace(COSTS.layers[LAYER], attention_start=SECOND)
    costs = replace(COSTS, layers={LAYER: layer})
    cut = plan(
        64, limits=Tiles(attention_pairs=8192), costs=costs
    )  # 64 * 64 * 4 triples: two units, a head each
    steps = [cut.work_done(index + 1) - cut.work_done(index) for index in range(8)]
    first, second = steps[3], steps[4]
    assert first / second == pytest.approx((1 + 8.192) / 8.192)


def test_a_point_outside_the_plan_is_clamped() -> None:
    done = plan(10)
    assert done.work_done(-1) == done.work_done(0)
    assert done.work_done(99) == done.work_done(done.num_points - 1)


def test_the_most_points_between_two_collectives() -> None:
    # From one layer's last linear to the next layer's: 7 points; after the last one come the head's 2.
    assert plan(10).max_points_between_collectives == 7
    assert plan(64, limits=Tiles(rows=32, attention_pairs=4096)).max_points_between_collectives == 8
    assert plan(10, granularity="layer").max_points_between_collectives == 1
    alone = ModelTrace(
        layers=(LayerTrace(ops=(LINEAR, Op(kind="attention"), LINEAR)),),
        tail=(),
        num_kv_heads=1,
        group_size=1,
        head_dim=4,
    )
    without = plan(10, trace=alone, costs=from_flops(alone, 1e9))
    assert without.max_points_between_collectives == without.num_points == 7


def test_tiles_keep_every_piece_within_its_share_of_the_gap() -> None:
    costs = from_flops(TRACE, flops_per_s=1e5)
    limits = choose_tiles(TRACE, costs, 0.5)
    assert limits.rows is not None
    assert limits.attention_pairs is not None
    linear, attention, _ = costs.layers[LAYER].ops
    assert linear.at(limits.rows) <= TILE_SHARE * 0.5 < linear.at(limits.rows + 32)
    assert (
        attention.at(limits.attention_pairs) <= TILE_SHARE * 0.5 < attention.at(limits.attention_pairs + 100)
    )
    assert limits.expert_rows is None


def test_without_a_bound_nothing_is_cut() -> None:
    assert choose_tiles(TRACE, COSTS, None) == Tiles()


def test_a_slow_machine_still_gets_tiles_of_some_rows() -> None:
    limits = choose_tiles(TRACE, from_flops(TRACE, flops_per_s=1.0), 0.001)
    assert limits.rows == 16
    assert limits.attention_pairs == 1


def test_experts_are_limited_in_pairs_of_token_and_expert() -> None:
    moe = LayerTrace(
        ops=(Op(kind="attention"), Op(kind="experts", flops_per_row=600, num_experts=4, top_k=2))
    )
    trace = ModelTrace(layers=(moe,), tail=(), num_kv_heads=1, group_size=1, head_dim=4)
    costs = from_flops(trace, flops_per_s=1e5)
    # A row costs 6 ms for its two experts, so 3 ms a pair, and 0.3 s hold (0.3 - 0.00002) / 0.003 of them.
    assert choose_tiles(trace, costs, 0.5).expert_rows == 99
