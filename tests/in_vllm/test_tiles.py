"""Operators in tiles: the same answers, many more points, and a pause between any two tiles changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flowprefill.engines.vllm_engine.tiles import TileLimits
from support.vllm.bench import Bench
from support.vllm.tokens import random_prompt

VARIANTS = ("llama", "qwen3_moe", "llama compiled")

LIMITS = TileLimits(rows=96, attention_pairs=20_000)


@pytest.fixture
def tiled(bench: Bench) -> Iterator[Bench]:
    bench.worker.stage.limits = LIMITS
    yield bench
    bench.worker.stage.limits = None


def test_answers_are_those_of_whole_operators(bench: Bench) -> None:
    given = {
        "long": random_prompt(900, seed=1),
        "a": random_prompt(20, seed=2),
        "b": random_prompt(300, seed=3),
    }
    answers = []
    for limits in (None, LIMITS):
        bench.worker.stage.limits = limits
        for name, prompt in given.items():
            bench.add(name, prompt, max_tokens=8)
        first = bench.start(*given)
        for _ in range(7):
            bench.start(*given)
        answers.append((first.points, {name: bench.outputs[name] for name in given}))
        bench.flush()
        bench.begin_test()
    bench.worker.stage.limits = None
    (few, whole), (many, tiled) = answers
    assert tiled == whole
    assert many > 3 * few


def test_progress_counts_the_points_that_come(tiled: Bench) -> None:
    tiled.add("long", random_prompt(700, seed=1))
    tiled.add("short", random_prompt(45, seed=2))
    flight = tiled.start("long", "short")
    batch = [(member.end - member.start, member.end) for member in flight.members]
    assert flight.points == tiled.worker.points.of(batch, "operator", LIMITS)


def test_a_prefix_in_the_cache_is_seen_by_every_tile(tiled: Bench) -> None:
    prefix = random_prompt(640, seed=1)
    tiled.add("first", prefix)
    tiled.start("first")
    tiled.add("second", prefix + random_prompt(500, seed=2), max_tokens=4)
    assert tiled.start("second").members[0].start == 640
    for _ in range(3):
        tiled.start("second")
    with_cache = list(tiled.outputs["second"])
    tiled.flush()
    tiled.begin_test()
    tiled.worker.stage.limits = None
    tiled.add("second", prefix + random_prompt(500, seed=2), max_tokens=4)
    for _ in range(4):
        tiled.start("second")
    assert tiled.outputs["second"] == with_cache


def test_a_pause_between_any_two_tiles(tiled: Bench) -> None:
    prompt = random_prompt(400, seed=1)
    tiled.add("counted", prompt)
    points = tiled.start("counted").points
    given = {"counted": prompt} | {f"r{k}": random_prompt(400, seed=k) for k in range(0, points, 3)}
    for number, name in enumerate(list(given)[1:]):
        tiled.add(name, given[name])
        tiled.add(f"short-{name}", random_prompt(33, seed=900 + number))
        flight = tiled.start(name, pause_at=3 * number)
        assert flight.record is None, "it stands at the point"
        tiled.start(f"short-{name}")
        tiled.resume(flight)
    shorts = {f"short-{n}": random_prompt(33, seed=900 + k) for k, n in enumerate(list(given)[1:])}
    tiled.same_without_pauses(given | shorts)
