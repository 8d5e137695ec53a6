"""The demo load: short chat prompts and long documents that share one prefill engine.

Every length and the rate follow from how fast this machine prefills, so that the load presses a laptop and a
server equally hard. One seed gives one load, whatever the system it is replayed against.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from flowprefill.bench.text import paragraphs, prose
from flowprefill.errors import FlowPrefillError

CHAT, DOCUMENT = "chat", "document"
MIX = (CHAT,) * 7 + (DOCUMENT,) * 3
"""Classes of every ten requests, in random order: so any stretch of the load has the mix of the whole."""
MIN_SHORT_TOKENS, MAX_SHORT_TOKENS = 64, 256
MIN_RATIO, MAX_RATIO = 10, 16
LONGEST_PREFILL_S = 2.0
HOPELESS_PREFILL_S = 8.0
LOAD = 0.75
SLO_FACTOR = {CHAT: 6.0, DOCUMENT: 8.0}
MAX_ANSWER_TOKENS = 16
FOLLOW_UP_SHARE = 0.25
"""Share of document requests that ask a new question about a document sent before (a prefix hit)."""

QUESTIONS = (
    "What is this passage about?",
    "Summarise the text in one sentence.",
    "Name one rule that the text states.",
    "Which term does the text define?",
    "What should a reader remember from this?",
)


class Tokens(Protocol):
    """The part of a tokenizer that lengths need."""

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Lengths of the load in tokens, chosen for one machine."""

    short_mean: int
    short_range: tuple[int, int]
    document_range: tuple[int, int]

    @property
    def document_mean(self) -> int:
        return sum(self.document_range) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadItem:
    """One request to send `at_s` seconds after the start.

    `target_tokens` is the length aimed at; the server's own count comes back in the answer's usage.
    `shared_tokens` of them are expected to hit the prefix cache.
    """

    at_s: float
    slo_class: str
    prompt: str
    target_tokens: int
    shared_tokens: int
    max_tokens: int


def choose_shape(predict_s: Callable[[int], float], max_model_len: int) -> Shape:
    """Lengths such that the longest document prefills in at most `LONGEST_PREFILL_S`, 16 times a mean short prompt.

    On a machine too slow for that short prompts have 64 tokens and documents 10 times as many at least, however long
    they take, up to `HOPELESS_PREFILL_S`; raises FlowPrefillError beyond. Documents vary by 3/16 of the longest.
    """
    shortest = MIN_SHORT_TOKENS * MIN_RATIO
    least_s = predict_s(shortest)
    if least_s > HOPELESS_PREFILL_S:
        raise FlowPrefillError(
            f"a prompt of {shortest} tokens prefills in {least_s:.1f} s here; the demo load needs at most "
            f"{HOPELESS_PREFILL_S:.0f} s: close other programs, or use a faster machine"
        )
    lengths = range(shortest, max_model_len - MIN_SHORT_TOKENS, 16)
    longest = max((n for n in lengths if predict_s(n) <= LONGEST_PREFILL_S), default=shortest)
    short_mean = min(max(longest // MAX_RATIO, MIN_SHORT_TOKENS), (MIN_SHORT_TOKENS + MAX_SHORT_TOKENS) // 2)
    high = min(longest, MAX_RATIO * short_mean)
    return Shape(
        short_mean=short_mean,
        short_range=(MIN_SHORT_TOKENS, 2 * short_mean - MIN_SHORT_TOKENS),
        document_range=(max(high * 13 // 16, MIN_RATIO * short_mean), high),
    )


def cut(tokens: Tokens, start: int, num_tokens: int) -> str:
    """Prose of `num_tokens` tokens (give or take one), from paragraph `start` on."""
    ids: list[int] = []
    for paragraph in prose(start):
        ids.extend(tokens.encode(paragraph + "\n"))
        if len(ids) >= num_tokens:
            return tokens.decode(ids[:num_tokens])
    raise AssertionError("prose never ends")


def make_load(
    tokens: Tokens,
    shape: Shape,
    *,
    num_short: int,
    seed: int,
    overhead_tokens: int = 0,
) -> tuple[LoadItem, ...]:
    """A load with at least `num_short` short requests, at unit rate (arrivals in mean service times).

    `overhead_tokens` is what the chat template adds. Arrivals are Poisson at 1 per second; `at_rate` stretches
    them to a real rate. When what arrives is drawn apart from what it says, so it is the same on every machine.
    """
    when, what = random.Random(f"{seed} when"), random.Random(f"{seed} what")
    items: list[LoadItem] = []
    sent: list[tuple[int, int]] = []  # (paragraph, tokens of text) of documents sent before
    now_s, shorts = 0.0, 0
    mix: list[str] = []
    while shorts < num_short:
        now_s += when.expovariate(1.0)
        question = what.choice(QUESTIONS)
        question_tokens = len(tokens.encode(question)) + 2
        start = what.randrange(len(paragraphs()))
        shared = 0
        if not mix:
            mix = list(MIX)
            when.shuffle(mix)
        slo_class = mix.pop()
        low, high = shape.short_range if slo_class == CHAT else shape.document_range
        shorts += slo_class == CHAT
        length = what.randint(low, high)
        text_tokens = max(length - overhead_tokens - question_tokens, 8)
        if slo_class == DOCUMENT:
            if when.random() < FOLLOW_UP_SHARE and sent:
                start, text_tokens = what.choice(sent[-4:])
                length = text_tokens + overhead_tokens + question_tokens
                shared = text_tokens
            else:
                sent.append((start, text_tokens))
        items.append(
            LoadItem(
                at_s=now_s,
                slo_class=slo_class,
                prompt=f"{cut(tokens, start, text_tokens)}\n\n{question}",
                target_tokens=length,
                shared_tokens=shared,
                max_tokens=what.randint(MAX_ANSWER_TOKENS // 2, MAX_ANSWER_TOKENS),
            )
        )
    return tuple(items)


def mean_service_s(items: Sequence[LoadItem], predict_s: Callable[[int, int], float]) -> float:
    """Mean predicted prefill time of this load, net of expected prefix hits, in seconds."""
    return sum(predict_s(i.target_tokens - i.shared_tokens, i.shared_tokens) for i in items) / len(items)


def at_rate(items: Sequence[LoadItem], rate_per_s: float) -> tuple[LoadItem, ...]:
    """The same requests in the same order at `rate_per_s` arrivals per second on average.

    Arrival times are scaled so that the realised mean rate is exactly `rate_per_s`: the load offered then
    depends on no luck of the draw.
    """
    if not rate_per_s > 0:
        raise ValueError(f"rate_per_s is {rate_per_s}; accepted are positive numbers")
    stretch = len(items) / rate_per_s / items[-1].at_s
    return tuple(replace(item, at_s=item.at_s * stretch) for item in items)
