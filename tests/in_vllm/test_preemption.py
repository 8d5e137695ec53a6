"""Steps that were paused compute what steps without a pause compute, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from support.vllm.bench import Bench, Flight
from support.vllm.tokens import random_prompt

VARIANTS = ("llama", "qwen3", "qwen3_moe", "llama compiled", "llama ranks", "qwen3_moe ranks")

Prompts = Mapping[str, Sequence[int]]


def prompts(**lengths: int) -> dict[str, list[int]]:
    return {name: random_prompt(length, seed=number) for number, (name, length) in enumerate(lengths.items())}


def add(bench: Bench, given: Prompts, **params: int) -> None:
    for name, prompt in given.items():
        bench.add(name, prompt, **params)


def test_nested_three_deep_and_resumed_in_another_order(bench: Bench) -> None:
    given = prompts(a=700, b=300, c=90, d=450)
    add(bench, given)
    a = bench.start("a", pause_at=7)
    b = bench.start("b", pause_at=11)
    c = bench.start("c", pause_at=3)
    bench.resume(a, pause_at=12)
    bench.resume(c)
    d = bench.start("d", pause_at=0)
    for flight in (b, a, d):
        bench.resume(flight)
    bench.same_without_pauses(given)


@pytest.mark.parametrize("granularity", ["operator", "layer"])
def test_a_pause_at_every_point(bench: Bench, granularity: str) -> None:
    points = bench.worker.num_points[granularity]
    given = {f"long-{k}": random_prompt(200, seed=k) for k in range(points)}
    given |= {f"short-{k}": random_prompt(40, seed=100 + k) for k in range(points)}
    add(bench, given)
    for k in range(points):
        flight = bench.start(f"long-{k}", pause_at=k, granularity=granularity)
        assert flight.record is None or bench.may_overtake(k, granularity), "it stands at the point"
        bench.start(f"short-{k}")
        if flight.record is None:
            bench.resume(flight)
        assert flight.points == points
    bench.same_without_pauses(given)


def test_several_pauses_of_a_batch_of_requests(bench: Bench) -> None:
    given = prompts(a=300, b=33, c=128, x=64, y=65)
    add(bench, given)
    batch = bench.start("a", "b", "c", pause_at=2)
    bench.start("x")
    bench.resume(batch, pause_at=9)
    bench.start("y")
    bench.resume(batch)
    bench.same_without_pauses(given)


def test_chunks_and_a_pause_inside_one(bench: Bench) -> None:
    given = prompts(a=700, b=100, c=60)
    add(bench, given)
    bench.start("a", tokens=256)
    chunk = bench.start("a", tokens=256, pause_at=6)
    bench.start("b")
    bench.start("c", pause_at=None)
    bench.resume(chunk)
    bench.start("a")
    bench.same_without_pauses(given)


def test_answers_go_on_in_other_slots_while_prompts_are_suspended(bench: Bench) -> None:
    given = prompts(a=600, b=80, c=90, d=70)
    add(bench, given, max_tokens=6)
    bench.start("b")
    a = bench.start("a", pause_at=5)
    bench.start("b")
    c = bench.start("c", pause_at=8)
    bench.start("b", pause_at=None)
    bench.start("d")
    bench.resume(c)
    bench.start("b", "c")
    bench.resume(a)
    bench.start("a", "b", "c", "d", pause_at=None)
    bench.start("c", "d", "a")
    bench.same_without_pauses(given, max_tokens=6)
    bench.abort(*given)


def test_a_prefix_shared_with_a_suspended_request_is_computed_anew(bench: Bench) -> None:
    prefix = random_prompt(320, seed=1)
    given = {"a": prefix + random_prompt(200, seed=2), "b": prefix + random_prompt(50, seed=3)}
    add(bench, given)
    a = bench.start("a", pause_at=4)
    b = bench.start("b")
    assert b.members[0].start == 0, "nothing of a suspended step is in the prefix cache"
    bench.resume(a)
    later = {"c": prefix + random_prompt(70, seed=4)}
    add(bench, later)
    c = bench.start("c")
    assert c.members[0].start == 320, "what has completed is"
    bench.same_without_pauses(given | later)


def test_without_the_cure_a_suspended_steps_blocks_are_read_before_they_hold_anything(bench: Bench) -> None:
    prefix = random_prompt(320, seed=1)
    given = {"a": prefix + random_prompt(200, seed=2), "b": prefix + random_prompt(50, seed=3)}
    add(bench, given)
    cured = bench.vllm.kv_cache_manager.__dict__.pop("allocate_slots")
    try:
        a = bench.start("a", pause_at=4)
        b = bench.start("b")
        assert b.members[0].start == 320, "stock registers blocks when it schedules them"
        bench.resume(a)
    finally:
        bench.vllm.kv_cache_manager.allocate_slots = cured
    wrong = b.record
    assert wrong is not None
    bench.flush()
    bench.begin_test()
    bench.add("b", given["b"])
    right = bench.start("b").record
    assert right is not None
    assert wrong.logits != right.logits, "the test can see the hazard"


def test_aborted_while_suspended_frees_after_it_has_unwound(bench: Bench) -> None:
    given = prompts(a=640, b=64)
    add(bench, given)
    before = bench.num_free_blocks
    a = bench.start("a", pause_at=6)
    assert bench.num_free_blocks == before - 20
    bench.abort("a")
    assert bench.num_free_blocks == before - 20, "its step would still write to them"
    bench.unwind(a)
    assert bench.num_free_blocks == before
    bench.start("b")
    bench.same_without_pauses({"b": given["b"]})


def test_aborted_while_it_waits_frees_at_once(bench: Bench) -> None:
    given = prompts(a=640, b=64)
    add(bench, given)
    a = bench.start("a", pause_at=6)
    bench.abort("b")
    assert "b" not in bench.vllm.requests
    bench.resume(a)
    bench.same_without_pauses({"a": given["a"]})


def test_one_of_a_suspended_batch_is_aborted(bench: Bench) -> None:
    given = prompts(a=320, b=96, c=64)
    add(bench, given)
    batch = bench.start("a", "b", pause_at=5)
    held = bench.num_free_blocks
    bench.abort("b")
    assert bench.num_free_blocks == held, "the batch goes on, with both"
    c = bench.start("c", pause_at=1)
    bench.resume(batch)
    bench.resume(c)
    assert "b" not in bench.vllm.requests
    bench.same_without_pauses(given)


def test_an_unwound_step_counts_for_nothing(bench: Bench) -> None:
    given = prompts(a=640, b=64)
    add(bench, given)
    before = bench.num_free_blocks
    a = bench.start("a", pause_at=9)
    bench.unwind(a)
    bench.vllm.give_back("a")
    assert bench.num_free_blocks == before
    del bench.started[-1]
    bench.start("b")
    again = bench.start("a")
    assert again.members[0].start == 0
    bench.same_without_pauses(given)


def test_one_unwinds_while_another_advances(bench: Bench) -> None:
    given = prompts(a=400, b=900)
    add(bench, given)
    a = bench.start("a", pause_at=3)
    b = bench.start("b", pause_at=1)
    bench.abort("a")
    bench.unwind_while(a, b)
    bench.same_without_pauses({"b": given["b"]})


def test_with_a_step_in_every_slot_a_batch_is_left_out_untouched(bench: Bench) -> None:
    given = prompts(**{f"p{number}": 70 for number in range(bench.num_slots)}, late=70)
    add(bench, given)
    suspended = [bench.start(f"p{number}", pause_at=1) for number in range(bench.num_slots)]
    begun = bench.bridge.begin(99, {"late": 70})
    assert begun.step is None
    assert begun.left_out == ("late",)
    assert bench.vllm.requests["late"].num_computed_tokens == 0
    bench.resume(suspended[2])
    late = bench.start("late")
    for number in (0, 1, 3, 4):
        bench.resume(suspended[number])
    assert late.record is not None
    bench.same_without_pauses(given)


def test_an_error_in_one_step_leaves_suspended_ones_alone(bench: Bench) -> None:
    given = prompts(a=500, b=64, c=77)
    add(bench, given)
    a = bench.start("a", pause_at=6)
    with bench.failing_at(4, "the operator broke"), pytest.raises(AssertionError, match="the operator broke"):
        bench.start("b")
    bench.abort("b")
    del bench.started[-1]
    bench.start("c")
    bench.resume(a)
    bench.same_without_pauses({"a": given["a"], "c": given["c"]})


@pytest.mark.parametrize("seed", range(4))
def test_random_steps(bench: Bench, seed: int) -> None:
    chance = random.Random(seed)
    points = bench.worker.num_points["operator"]
    shared = random_prompt(96, seed=1000 + seed)
    given = {
        f"r{k}": (shared if chance.random() < 0.4 else []) + random_prompt(chance.randint(1, 400), seed=k)
        for k in range(24)
    }
    add(bench, given, max_tokens=3)
    suspended: list[Flight] = []
    waiting = list(given)
    growing: list[str] = []
    while waiting or suspended or growing:
        room = len(suspended) < bench.num_slots - 1
        pause = chance.choice([None, *range(points)]) if room else None
        kind = chance.choice(
            ["prompt"] * 3 * bool(waiting) + ["answer"] * bool(growing) + ["resume"] * bool(suspended)
        )
        if kind == "prompt":
            chosen = [waiting.pop(0) for _ in range(min(len(waiting), chance.randint(1, 3)))]
            flight = bench.start(*chosen, tokens=chance.choice([None, 128, 160]), pause_at=pause)
        elif kind == "answer":
            chosen = chance.sample(growing, chance.randint(1, min(len(growing), 4)))
            growing = [i for i in growing if i not in chosen]
            flight = bench.start(*chosen, pause_at=pause)
        else:
            flight = bench.resume(suspended.pop(chance.randrange(len(suspended))), pause_at=pause)
        if flight.record is None:
            suspended.append(flight)
            continue
        for member in flight.members:
            request = bench.vllm.requests.get(member.request_id)
            if request is None or request.is_finished():
                continue
            (growing if request.num_output_tokens else waiting).append(member.request_id)
    bench.same_without_pauses(given, max_tokens=3)
