"""Every family's engine against one plain transformers forward. Float32, one thread.

Tolerances: an uncut prompt makes the very calls that transformers makes and has its bits (MoE apart: experts are summed in
another order). Tiles, chunks and prefix hits split attention's sums, so those are equal to rounding: 2e-4 of the largest
logit, some ten times what was seen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402 - what follows needs torch

from flowprefill.engines.torch_engine import TorchEngine
from flowprefill.engines.torch_engine.layout import Tiles
from support.tiny_models import FAMILIES, VOCAB_SIZE, plain_greedy, plain_logits, tiny_model
from support.torch_runs import InterruptingGate, OpenGate, greedy, in_thread, item, logits

pytestmark = pytest.mark.torch

ROUNDING = 2e-4
MIXTURES = {"mixtral", "qwen3_moe", "qwen2_moe"}
TILES = Tiles(rows=24, attention_pairs=300, expert_rows=12, head_rows=3)


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def engine(family: str) -> Iterator[TorchEngine]:
    engine = TorchEngine.load(tiny_model(family), dtype="float32", kv_cache_tokens=1024, block_size=8)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def untiled(engine: TorchEngine) -> None:
    engine.tiles = Tiles()


def prompt(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCAB_SIZE) for _ in range(length)]


def assert_same(ours: torch.Tensor, plain: torch.Tensor) -> None:
    assert float((ours - plain).abs().max()) <= ROUNDING * float(plain.abs().max())


def test_an_uncut_prompt_has_the_logits_of_a_plain_forward(engine: TorchEngine, family: str) -> None:
    tokens = prompt(70)
    [ours] = logits(engine, [item(engine, tokens)])
    plain = plain_logits(tiny_model(family), tokens)
    assert_same(ours, plain)
    windowed = "sliding_window" in FAMILIES[family]
    if family not in MIXTURES and not windowed:
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("rows", [7, 24, 64])
def test_tiles_change_nothing(engine: TorchEngine, family: str, rows: int) -> None:
    tokens = prompt(70)
    engine.tiles = Tiles(rows=rows, attention_pairs=200, expert_rows=5)
    [ours] = logits(engine, [item(engine, tokens)])
    assert_same(ours, plain_logits(tiny_model(family), tokens))


@pytest.mark.parametrize("tiles", [Tiles(), TILES])
def test_packed_prompts_have_the_logits_of_each_alone(engine: TorchEngine, family: str, tiles: Tiles) -> None:
    prompts = [prompt(length, seed=length) for length in (5, 40, 1, 33)]
    engine.tiles = tiles
    ours = logits(engine, [item(engine, tokens, first_block=10 * n) for n, tokens in enumerate(prompts)])
    for row, tokens in zip(ours, prompts, strict=True):
        assert_same(row, plain_logits(tiny_model(family), tokens))


@pytest.mark.parametrize("tiles", [Tiles(), TILES])
@pytest.mark.parametrize("cached", [8, 40, 69])
def test_a_prompt_continued_after_cached_blocks_has_the_same_logits(
    engine: TorchEngine, family: str, cached: int, tiles: Tiles
) -> None:
    tokens = prompt(70)
    assert logits(engine, [item(engine, tokens[:cached], sample=False)]) is None
    # Another prompt shares the packed batch, so that rows and blocks of the two could be mixed up.
    engine.tiles = tiles
    both = logits(
        engine, [item(engine, prompt(9, seed=4), first_block=30), item(engine, tokens, start=cached)]
    )
    assert_same(both[1], plain_logits(tiny_model(family), tokens))


def test_chunks_one_after_the_other_have_the_logits_of_the_whole(engine: TorchEngine, family: str) -> None:
    tokens = prompt(70)
    for end in range(16, 70, 16):
        logits(engine, [item(engine, tokens[:end], start=end - 16, sample=False)])
    [ours] = logits(engine, [item(engine, tokens, start=64)])
    assert_same(ours, plain_logits(tiny_model(family), tokens))


def test_blocks_may_lie_anywhere_in_the_pool(engine: TorchEngine, family: str) -> None:
    tokens = prompt(70)
    scattered = random.Random(5).sample(range(100), 9)
    whole = replace(item(engine, tokens), block_ids=scattered)
    head = replace(whole, token_ids=tokens[:48], sample=False)
    tail = replace(whole, token_ids=tokens[48:], start=48)
    for tiles in (Tiles(), TILES):
        engine.tiles = tiles
        assert_same(logits(engine, [whole])[0], plain_logits(tiny_model(family), tokens))
        engine.write_blocks(range(128), memoryview(bytes(128 * engine.spec.kv_block_bytes)))
        logits(engine, [head])
        assert_same(logits(engine, [tail])[0], plain_logits(tiny_model(family), tokens))


def test_greedy_text_is_that_of_plain_forwards(engine: TorchEngine, family: str) -> None:
    tokens = prompt(30)
    assert greedy(engine, tokens, 12) == plain_greedy(tiny_model(family), tokens, 12)


@pytest.mark.parametrize("tiles", [Tiles(), TILES])
def test_a_pause_at_any_one_point_changes_no_bit(engine: TorchEngine, tiles: Tiles) -> None:
    engine.tiles = tiles
    tokens, intruder = prompt(40), prompt(11, seed=3)
    alone = logits(engine, [item(engine, tokens)])
    intruder_alone = logits(engine, [item(engine, intruder, first_block=20)])
    plan = engine.plan_prefill([item(engine, tokens)], "operator")

    def interrupt(index: int) -> None:
        seen.append(in_thread(lambda: logits(engine, [item(engine, intruder, first_block=20)])))

    for point in range(plan.num_points):
        seen: list[torch.Tensor] = []
        gate = InterruptingGate(interrupt, at=[point])
        interrupted = in_thread(lambda gate=gate: logits(engine, [item(engine, tokens)], gate))
        assert gate.pauses == 1
        assert torch.equal(interrupted, alone)
        assert torch.equal(seen[0], intruder_alone)


def test_tasks_nested_three_deep_and_in_every_point_change_no_bit(engine: TorchEngine) -> None:
    engine.tiles = TILES
    prompts = [prompt(50, seed=1), prompt(26, seed=2), prompt(9, seed=3)]
    items = [item(engine, tokens, first_block=20 * n) for n, tokens in enumerate(prompts)]
    alone = [logits(engine, [one]) for one in items]

    def run(depth: int) -> None:
        gate = InterruptingGate(lambda index: in_thread(lambda: run(depth + 1)), at=range(3, 500, 29))
        last = depth == len(items) - 1
        assert torch.equal(logits(engine, [items[depth]], OpenGate() if last else gate), alone[depth])

    in_thread(lambda: run(0))


def test_a_decode_step_over_several_sequences_gives_each_its_own_token(
    engine: TorchEngine, family: str
) -> None:
    from flowprefill.engines.protocol import DecodeSequence, SamplingParams

    prompts = [prompt(length, seed=length) for length in (17, 40, 3)]
    items = [item(engine, tokens, first_block=10 * n) for n, tokens in enumerate(prompts)]
    for one, tokens in zip(items, prompts, strict=True):
        logits(engine, [item(engine, tokens[:-1], first_block=one.block_ids[0], sample=False)])
    step = engine.plan_decode(
        [
            DecodeSequence(
                request_id="d",
                last_token_id=tokens[-1],
                position=len(tokens) - 1,
                block_ids=one.block_ids,
                sampling=SamplingParams(temperature=0.0),
            )
            for one, tokens in zip(items, prompts, strict=True)
        ]
    )
    expected = [int(plain_logits(tiny_model(family), tokens).argmax()) for tokens in prompts]
    assert engine.run(step, OpenGate()) == expected


def test_layer_granularity_has_one_point_a_layer(engine: TorchEngine) -> None:
    engine.tiles = TILES
    plan = engine.plan_prefill([item(engine, prompt(50))], "layer")
    gate = InterruptingGate(lambda index: None)
    engine.forward(plan, gate)
    assert gate.pauses == plan.num_points == engine.spec.num_layers
