"""Sampling against probabilities computed by hand or by counting."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402 - what follows needs torch

from flowprefill.engines.protocol import DecodeSequence, SamplingParams
from flowprefill.engines.torch_engine.sampling import draw_token, greedy, sample

pytestmark = pytest.mark.torch

PROBABILITIES = (0.1, 0.4, 0.2, 0.3)
LOGITS = torch.tensor([math.log(p) for p in PROBABILITIES])


def sequence(
    *, temperature: float = 1.0, top_p: float = 1.0, seed: int | None = None, banned: tuple[int, ...] = ()
) -> DecodeSequence:
    return DecodeSequence(
        request_id="s",
        last_token_id=0,
        position=0,
        block_ids=(0,),
        sampling=SamplingParams(temperature=temperature, top_p=top_p, seed=seed),
        banned_token_ids=banned,
    )


def shares(temperature: float, top_p: float) -> dict[int, float]:
    """How often each token comes over evenly spread quantiles."""
    count = 4_000
    drawn = Counter(draw_token(LOGITS, temperature, top_p, (k + 0.5) / count) for k in range(count))
    return {token: times / count for token, times in drawn.items()}


def test_tokens_come_as_often_as_their_probability_says() -> None:
    assert shares(1.0, 1.0) == pytest.approx(dict(enumerate(PROBABILITIES)), abs=1e-3)


def test_temperature_two_takes_the_square_root_of_the_odds() -> None:
    roots = [math.sqrt(p) for p in PROBABILITIES]
    assert shares(2.0, 1.0) == pytest.approx({n: root / sum(roots) for n, root in enumerate(roots)}, abs=1e-3)


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.69, {1: 4 / 7, 3: 3 / 7}),  # 0.4 is below 0.69, with 0.3 it is reached
        (0.39, {1: 1.0}),
        (0.0001, {1: 1.0}),  # never empty
        (0.75, {1: 4 / 9, 3: 3 / 9, 2: 2 / 9}),
    ],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, expected: dict[int, float]) -> None:
    assert shares(1.0, top_p) == pytest.approx(expected, abs=1e-3)


def test_a_tiny_temperature_is_greedy() -> None:
    assert shares(1e-6, 1.0) == {1: 1.0}


def test_an_impossible_token_is_never_drawn_at_the_edge() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf")])
    assert {draw_token(logits, 1.0, 1.0, draw) for draw in (0.0, 0.5, 1 - 1e-16)} == {1}


def test_greedy_takes_the_largest() -> None:
    assert greedy(torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, 1.0]])) == [1, 0]


def test_a_seeded_sequence_draws_the_same_whatever_is_beside_it() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(1))

    def drawn(*others: DecodeSequence) -> list[int]:
        mine = sequence(seed=7)
        batch = [mine, *others]
        return [sample(row.expand(len(batch), -1), batch, random.Random(3))[0] for row in logits]

    alone = drawn()
    assert drawn(sequence(), sequence(seed=1), sequence(temperature=0.0)) == alone
    assert len(set(alone)) > 1


def test_sequences_with_one_seed_draw_alike_and_with_two_do_not() -> None:
    logits = torch.zeros(3, 1000)
    batch = [sequence(seed=7), sequence(seed=7), sequence(seed=8)]
    steps = [sample(logits, batch, random.Random(0)) for _ in range(5)]
    first, second, third = zip(*steps, strict=True)
    assert first == second != third


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_tokens_are_not_chosen(temperature: float) -> None:
    batch = [sequence(temperature=temperature, seed=seed, banned=(1, 3)) for seed in range(200)]
    chosen = set(sample(LOGITS.expand(200, -1), batch, random.Random(0)))
    assert chosen == ({2} if temperature == 0.0 else {0, 2})
    assert torch.isfinite(LOGITS).all()  # the caller's logits are left alone
