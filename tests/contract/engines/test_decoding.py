"""Decode steps, for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flowprefill.engines.protocol import GREEDY, DecodeSequence, Engine, SamplingParams
from support.engine_runs import Gate, alone, blocks, in_a_thread, item, open_gate, prefill, prompt


def sequence(
    tokens: Sequence[int], block_ids: Sequence[int], *, name: str = "s", sampling: SamplingParams = GREEDY
) -> DecodeSequence:
    return DecodeSequence(
        request_id=name,
        last_token_id=tokens[-1],
        position=len(tokens) - 1,
        block_ids=block_ids,
        sampling=sampling,
    )


def step(engine: Engine, *sequences: DecodeSequence, gate: Gate | None = None) -> list[int]:
    results = engine.run(engine.plan_decode(sequences), gate or open_gate())
    tokens = [token_id for token_id in results if token_id is not None]
    assert len(tokens) == len(results) == len(sequences)
    for one, token_id in zip(sequences, tokens, strict=True):
        one.last_token_id = token_id
        one.position += 1
    return tokens


def greedy_answer(engine: Engine, tokens: Sequence[int], length: int) -> list[int]:
    """Each token from a prefill of everything before it."""
    text = list(tokens)
    for _ in range(length):
        text.append(alone(engine, text, first_block=50))
    return text[len(tokens) :]


def test_decoding_continues_a_prefill_from_its_last_token(engine: Engine) -> None:
    prompts = [prompt(11, 18, engine), prompt(12, 5, engine), prompt(13, 32, engine)]
    expected = [greedy_answer(engine, tokens, 6) for tokens in prompts]
    sequences = []
    for number, tokens in enumerate(prompts):
        block_ids = blocks(engine, 12 * number, len(tokens) + 6)
        prefill(engine, item(tokens, block_ids))
        sequences.append(sequence(tokens, block_ids, name=f"s{number}"))
    answers = [step(engine, *sequences) for _ in range(6)]
    assert [list(column) for column in zip(*answers, strict=True)] == expected


def test_a_decode_step_can_be_stopped_for_a_prompt(engine: Engine) -> None:
    tokens, other = prompt(14, 18, engine), prompt(15, 30, engine)
    expected, expected_other = greedy_answer(engine, tokens, 3), alone(engine, other)
    block_ids = blocks(engine, 0, 21)
    prefill(engine, item(tokens, block_ids))
    one = sequence(tokens, block_ids)
    seen: list[int] = []

    def run_other() -> None:
        in_a_thread(engine, lambda: seen.append(alone(engine, other, first_block=30)))

    plan = engine.plan_decode([one])
    gates = [Gate({index: run_other}) for index in (0, plan.num_points // 2, plan.num_points - 1)]
    assert [step(engine, one, gate=gate)[0] for gate in gates] == expected
    assert seen == [expected_other] * 3


def test_a_seed_decides_what_is_sampled(engine: Engine) -> None:
    tokens = prompt(16, 18, engine)
    answers = []
    for number, seed in enumerate([5, 5, 6]):
        block_ids = blocks(engine, 10 * number, 26)
        prefill(engine, item(tokens, block_ids))
        one = sequence(tokens, block_ids, sampling=SamplingParams(temperature=1.0, seed=seed))
        answers.append([step(engine, one)[0] for _ in range(8)])
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def test_a_banned_token_is_not_chosen(engine: Engine) -> None:
    tokens = prompt(17, 18, engine)
    best = alone(engine, tokens)
    one = sequence(tokens, blocks(engine, 0, 20))
    one.banned_token_ids = (best,)
    assert step(engine, one)[0] != best


def test_a_prefill_draws_an_answers_first_token_as_a_step_would(engine: Engine) -> None:
    tokens, length = prompt(19, 18, engine), 8
    for number, sampling in enumerate([GREEDY, SamplingParams(temperature=1.0, top_p=0.9, seed=3)]):
        block_ids = blocks(engine, 20 * number, len(tokens) + length)
        prefill(engine, item(tokens, block_ids))
        whole = sequence(tokens, block_ids, sampling=sampling)
        expected = [step(engine, whole)[0] for _ in range(length)]
        block_ids = blocks(engine, 20 * number + 10, len(tokens) + length)
        [first] = prefill(engine, replace(item(tokens, block_ids), sampling=sampling))
        assert first is not None
        rest = replace(sequence([*tokens, first], block_ids, sampling=sampling), num_sampled=1)
        assert [first, *(step(engine, rest)[0] for _ in range(length - 1))] == expected


def test_rows_of_one_prefill_are_drawn_each_in_its_own_way(engine: Engine) -> None:
    tokens = prompt(20, 18, engine)
    ways = [SamplingParams(temperature=1.0, seed=seed) for seed in (1, 2, 3)]
    alone_each = [
        prefill(engine, replace(item(tokens, blocks(engine, 0, 18)), sampling=way))[0] for way in ways
    ]
    items = [
        replace(item(tokens, blocks(engine, 10 * n, 18), name=f"r{n}"), sampling=way)
        for n, way in enumerate([*ways, GREEDY])
    ]
    assert prefill(engine, *items) == [*alone_each, alone(engine, tokens)]
    assert len(set(alone_each)) > 1
