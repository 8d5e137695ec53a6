"""What the execution pool and the servers rely on, for every engine."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from flowprefill.engines.protocol import Engine, TaskUnwound
from support.engine_runs import Gate, alone, blocks, in_a_thread, item, open_gate, prefill, prompt

# What it says of itself, and of a batch before running it.


def test_its_kv_block_has_the_size_that_its_layout_says(engine: Engine) -> None:
    spec = engine.spec
    item_bytes = 2 if spec.dtype in ("bfloat16", "float16") else np.dtype(spec.dtype).itemsize
    per_token = spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * item_bytes
    assert spec.kv_block_bytes == per_token * spec.block_size
    assert engine.read_blocks([0, 1]).nbytes == 2 * spec.kv_block_bytes
    assert spec.num_kv_blocks >= 64
    assert all(0 <= token_id < spec.vocab_size for token_id in spec.eos_token_ids)


def test_points_are_numbered_from_zero_and_each_is_passed_once_in_order(engine: Engine) -> None:
    tokens = prompt(1, 37, engine)
    for granularity in ("operator", "layer"):
        plan = engine.plan_prefill([item(tokens, blocks(engine, 0, 37))], granularity)
        gate = open_gate()
        engine.run(plan, gate)
        assert gate.visited == list(range(plan.num_points))


def test_work_done_grows_from_nothing_towards_everything(engine: Engine) -> None:
    plan = engine.plan_prefill([item(prompt(1, 90, engine), blocks(engine, 0, 90))], "operator")
    work = [plan.work_done(index) for index in range(plan.num_points)]
    assert 0.0 <= work[0] < 0.5  # embeddings may lie before the first point
    assert work == sorted(work)
    assert 0.5 < work[-1] <= 1.0


def test_equal_batches_have_equal_points(engine: Engine) -> None:
    plans = [
        engine.plan_prefill([item(prompt(seed, 50, engine), blocks(engine, 0, 50))], "operator")
        for seed in (1, 2)
    ]
    assert plans[0].num_points == plans[1].num_points
    assert plans[0].max_points_between_collectives == plans[1].max_points_between_collectives >= 1


def test_points_at_operators_are_finer_than_points_at_layers(engine: Engine) -> None:
    items = [item(prompt(1, 50, engine), blocks(engine, 0, 50))]
    assert (
        engine.plan_prefill(items, "layer").num_points * 3 < engine.plan_prefill(items, "operator").num_points
    )


# Results.


def test_one_result_per_item_and_none_where_no_token_is_asked_for(engine: Engine) -> None:
    a, b = prompt(1, 20, engine), prompt(2, 30, engine)
    results = prefill(
        engine,
        item(a, blocks(engine, 0, 20), sample=False, name="a"),
        item(b, blocks(engine, 20, 30), name="b"),
    )
    assert results[0] is None
    assert results[1] is not None
    assert 0 <= results[1] < engine.spec.vocab_size


def test_a_packed_batch_gives_what_its_prompts_give_alone(engine: Engine) -> None:
    prompts = [prompt(seed, length, engine) for seed, length in enumerate([1, 7, 33, 16, 60])]
    expected = [alone(engine, tokens) for tokens in prompts]
    items = [
        item(tokens, blocks(engine, 12 * number, len(tokens)), name=f"r{number}")
        for number, tokens in enumerate(prompts)
    ]
    assert prefill(engine, *items) == expected


def test_a_prompt_in_chunks_gives_what_it_gives_whole(engine: Engine) -> None:
    tokens = prompt(3, 61, engine)
    expected = alone(engine, tokens)
    block_ids = blocks(engine, 20, 61)
    cuts = [0, 13, 14, 40, 61]
    for start, end in itertools.pairwise(cuts):
        [result] = prefill(engine, item(tokens, block_ids, start=start, end=end, sample=end == 61))
    assert result == expected


def test_chunks_and_whole_prompts_share_a_batch(engine: Engine) -> None:
    long, short = prompt(3, 61, engine), prompt(4, 9, engine)
    expected = [alone(engine, long), alone(engine, short)]
    block_ids = blocks(engine, 20, 61)
    prefill(engine, item(long, block_ids, end=40, sample=False))
    results = prefill(
        engine,
        item(long, block_ids, start=40, name="long"),
        item(short, blocks(engine, 40, 9), name="short"),
    )
    assert results == expected


def test_a_cached_prefix_gives_what_computing_it_gives(engine: Engine) -> None:
    size = engine.spec.block_size
    base = prompt(5, 3 * size, engine)
    prefill(engine, item(base, blocks(engine, 0, len(base))))
    tokens = base + prompt(6, 11, engine)
    block_ids = [0, 1, 2, *blocks(engine, 30, 11)]
    [result] = prefill(engine, item(tokens, block_ids, start=3 * size))
    assert result == alone(engine, tokens, first_block=40)


# Suspension.


def test_stopped_at_every_point_in_turn_with_another_prompt_in_between(engine: Engine) -> None:
    tokens, other = prompt(7, 29, engine), prompt(8, 5, engine)
    expected, expected_other = alone(engine, tokens), alone(engine, other)
    plan = engine.plan_prefill([item(tokens, blocks(engine, 0, 29))], "operator")
    seen: list[int] = []

    def run_other() -> None:
        in_a_thread(engine, lambda: seen.append(alone(engine, other, first_block=30)))

    step = max(plan.num_points // 40, 1)
    for index in range(0, plan.num_points, step):
        assert prefill(engine, item(tokens, blocks(engine, 0, 29)), gate=Gate({index: run_other})) == [
            expected
        ]
    assert set(seen) == {expected_other}
    assert len(seen) == len(range(0, plan.num_points, step))


def test_three_deep_and_a_batch_in_the_middle(engine: Engine) -> None:
    a, b, c, d = (prompt(seed, length, engine) for seed, length in ((1, 40), (2, 23), (3, 12), (4, 7)))
    expected = [alone(engine, tokens) for tokens in (a, b, c, d)]
    results: dict[str, list[int | None]] = {}

    def run_d() -> None:
        results["d"] = prefill(engine, item(d, blocks(engine, 40, 7)))

    def run_b_and_c() -> None:
        gate = Gate({2: lambda: in_a_thread(engine, run_d), 9: lambda: in_a_thread(engine, run_d)})
        results["bc"] = prefill(
            engine,
            item(b, blocks(engine, 20, 23), name="b"),
            item(c, blocks(engine, 30, 12), name="c"),
            gate=gate,
        )

    gate = Gate({5: lambda: in_a_thread(engine, run_b_and_c)})
    results["a"] = prefill(engine, item(a, blocks(engine, 0, 40)), gate=gate)
    assert results == {"a": [expected[0]], "bc": expected[1:3], "d": [expected[3]]}


def test_two_suspended_tasks_go_on_in_the_order_in_which_they_came(engine: Engine) -> None:
    a, b = prompt(1, 40, engine), prompt(2, 23, engine)
    expected = [alone(engine, a), alone(engine, b)]
    results: dict[str, list[int | None]] = {}
    b_stands, b_goes_on = threading.Event(), threading.Event()

    def hold_b() -> None:
        b_stands.set()
        assert b_goes_on.wait(120)

    def run_b() -> None:
        with engine.thread_context():
            results["b"] = prefill(engine, item(b, blocks(engine, 20, 23)), gate=Gate({4: hold_b}))

    thread = threading.Thread(target=run_b)

    def start_b() -> None:
        thread.start()
        assert b_stands.wait(120)

    results["a"] = prefill(engine, item(a, blocks(engine, 0, 40)), gate=Gate({7: start_b}))
    b_goes_on.set()
    thread.join(120)
    assert results == {"a": [expected[0]], "b": [expected[1]]}


def test_a_task_unwound_at_any_point_leaves_the_engine_and_the_others_as_they_were(engine: Engine) -> None:
    tokens, other = prompt(1, 21, engine), prompt(2, 30, engine)
    expected, expected_other = alone(engine, tokens), alone(engine, other)
    num_points = engine.plan_prefill([item(tokens, blocks(engine, 0, 21))], "operator").num_points

    def unwind() -> None:
        raise TaskUnwound

    def run_and_unwind(index: int) -> None:
        with pytest.raises(TaskUnwound):
            prefill(engine, item(tokens, blocks(engine, 0, 21)), gate=Gate({index: unwind}))

    for index in range(0, num_points, max(num_points // 15, 1)):
        gate = Gate({3: lambda index=index: in_a_thread(engine, lambda: run_and_unwind(index))})
        assert prefill(engine, item(other, blocks(engine, 20, 30)), gate=gate) == [expected_other]
    assert alone(engine, tokens) == expected


# Moving KV.


def test_blocks_carry_kv_to_other_blocks(engine: Engine) -> None:
    tokens = prompt(9, 45, engine)
    expected = alone(engine, tokens, first_block=0)
    source, target = blocks(engine, 0, 45), blocks(engine, 30, 45)
    engine.write_blocks(target, engine.read_blocks(source))
    assert engine.read_blocks(target) == engine.read_blocks(source)
    [result] = prefill(engine, item(tokens, target, start=44))
    assert result == expected


def test_blocks_keep_their_order_and_their_place_in_the_bytes(engine: Engine) -> None:
    spec = engine.spec
    tokens = prompt(10, 3 * spec.block_size, engine)
    alone(engine, tokens)
    # [layer, 2, block, rest] -> the block axis is the third.
    shape = (spec.num_layers, 2, 3, -1)
    all_three = np.frombuffer(engine.read_blocks([0, 1, 2]), np.uint8).reshape(shape)
    for position, block_id in enumerate([0, 1, 2]):
        one = np.frombuffer(engine.read_blocks([block_id]), np.uint8).reshape(spec.num_layers, 2, 1, -1)
        assert (all_three[:, :, position] == one[:, :, 0]).all()


def test_what_was_read_does_not_change_with_the_cache(engine: Engine) -> None:
    alone(engine, prompt(1, 10, engine))
    before = engine.read_blocks([0])
    copy = bytes(before)
    alone(engine, prompt(2, 10, engine))
    assert bytes(before) == copy
    assert bytes(engine.read_blocks([0])) != copy


def test_bytes_of_a_wrong_size_are_refused(engine: Engine) -> None:
    data = engine.read_blocks([0, 1])
    with pytest.raises(ValueError):
        engine.write_blocks([0], data)
    with pytest.raises(ValueError):
        engine.write_blocks([0, 1, 2], data)


# Mistakes.


@pytest.mark.parametrize("mistake", ["token id", "too few blocks", "no such block"])
def test_a_batch_with_a_mistake_raises_and_the_next_one_runs(engine: Engine, mistake: str) -> None:
    tokens = prompt(18, 20, engine)
    block_ids = blocks(engine, 0, 20)
    wrong = {
        "token id": lambda: item([*tokens[:-1], engine.spec.vocab_size], block_ids),
        "too few blocks": lambda: item(tokens, block_ids[:1]),
        "no such block": lambda: item(tokens, [*block_ids[:-1], engine.spec.num_kv_blocks]),
    }[mistake]()
    expected = alone(engine, tokens)
    with pytest.raises(Exception):  # noqa: B017 (each engine has its own words for it)
        prefill(engine, wrong)
    assert alone(engine, tokens) == expected
