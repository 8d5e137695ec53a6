"""Next tokens from logits. A seeded sequence draws the same tokens whatever shares its batch."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from flowprefill.engines.protocol import DecodeSequence, SamplingParams


def greedy(logits: Tensor) -> list[int]:
    """The most likely token of each row of `logits` [S, V]; the lowest id wins a tie."""
    # As argmax, which is four times slower on a CPU in half precision.
    tokens: list[int] = logits.max(dim=-1).indices.tolist()
    return tokens


def first_tokens(logits: Tensor, samplings: Sequence[SamplingParams], process: random.Random) -> list[int]:
    """One token per row of `logits` [S, V]: the first of each answer, as `sample` would choose it."""
    tokens = greedy(logits)
    for row, sampling in enumerate(samplings):
        if sampling.temperature > 0:
            source = process if sampling.seed is None else random.Random(sampling.seed)
            tokens[row] = draw_token(logits[row], sampling.temperature, sampling.top_p, source.random())
    return tokens


def sample(logits: Tensor, sequences: Sequence[DecodeSequence], process: random.Random) -> list[int]:
    """One token per sequence from `logits` [B, V].

    A sequence with a seed owns a generator that advances once per token; others draw from `process`. Banned tokens are
    never chosen, unless they are all there is.
    """
    tokens: list[int] = []
    for row, sequence in zip(logits, sequences, strict=True):
        if sequence.banned_token_ids:
            row = row.clone()
            row[list(sequence.banned_token_ids)] = float("-inf")
        if sequence.sampling.temperature <= 0:
            tokens.append(int(row.argmax()))
        else:
            draw = _generator(sequence, process).random()
            tokens.append(draw_token(row, sequence.sampling.temperature, sequence.sampling.top_p, draw))
    return tokens


def draw_token(logits: Tensor, temperature: float, top_p: float, draw: float) -> int:
    """The token at quantile `draw` in [0, 1) of the softmax of `logits` [V] over `temperature`, cut to the nucleus.

    The nucleus is the smallest set of most likely tokens whose probability reaches `top_p`. float64 on the host: one
    arithmetic for every device and type.
    """
    # Subtracting the maximum first keeps the smallest temperatures finite.
    scores = logits.to("cpu", torch.float64)
    probabilities = torch.softmax((scores - scores.max()) / temperature, dim=-1)
    order: Tensor | None = None
    if top_p < 1.0:
        probabilities, order = torch.sort(probabilities, descending=True, stable=True)
        before = torch.cumsum(probabilities, dim=-1) - probabilities
        size = max(1, int((before < top_p).sum()))
        probabilities = probabilities[:size]
    cumulative = torch.cumsum(probabilities, dim=-1)
    target = draw * float(cumulative[-1])
    index = int(torch.searchsorted(cumulative, target, right=True))
    index = min(index, len(cumulative) - 1)
    while probabilities[index] == 0 and index > 0:
        index -= 1
    return index if order is None else int(order[index])


def _generator(sequence: DecodeSequence, process: random.Random) -> random.Random:
    if sequence.sampling.seed is None:
        return process
    if sequence.generator is None:
        sequence.generator = generator = random.Random(sequence.sampling.seed)
        for _ in range(sequence.num_sampled):
            generator.random()
    assert isinstance(sequence.generator, random.Random), "a sequence's generator is filled in by this engine"
    return sequence.generator
