from __future__ import annotations

import pytest

from flowprefill.bench.load import CHAT, DOCUMENT, at_rate, choose_shape, make_load, mean_service_s
from flowprefill.bench.text import paragraphs
from flowprefill.errors import FlowPrefillError


class Words:
    """A tokenizer of one token a word, so that lengths can be counted by eye."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            self.words.append(word)
            ids.append(len(self.words) - 1)
        return ids

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(self.words[i] for i in token_ids)


def per_token(seconds: float):  # type: ignore[no-untyped-def]
    return lambda n: seconds * n


@pytest.mark.parametrize("tokens_per_s", [330, 600, 2_000, 20_000])
def test_documents_are_10_to_16_times_longer_and_the_longest_takes_at_most_2_s(tokens_per_s: int) -> None:
    shape = choose_shape(per_token(1 / tokens_per_s), max_model_len=8192)
    low, high = shape.document_range
    assert low >= 10 * shape.short_mean
    assert high <= 16 * shape.short_mean
    assert 64 <= shape.short_range[0] <= shape.short_mean <= shape.short_range[1] <= 256
    assert high / tokens_per_s <= 2.0


def test_a_slow_machine_keeps_the_ratio_and_takes_its_time() -> None:
    shape = choose_shape(per_token(1 / 200), max_model_len=8192)
    assert (shape.short_range, shape.document_range) == ((64, 64), (640, 640))


def test_a_machine_that_is_too_slow_is_told_so() -> None:
    with pytest.raises(FlowPrefillError, match="close other programs"):
        choose_shape(per_token(1 / 50), max_model_len=8192)


def test_one_seed_gives_one_load_and_another_seed_another() -> None:
    shape = choose_shape(per_token(1 / 2000), max_model_len=8192)
    first = make_load(Words(), shape, num_short=20, seed=3)
    assert first == make_load(Words(), shape, num_short=20, seed=3)
    assert first != make_load(Words(), shape, num_short=20, seed=4)


def test_lengths_shares_and_follow_ups_are_as_stated() -> None:
    shape = choose_shape(per_token(1 / 600), max_model_len=8192)
    items = make_load(Words(), shape, num_short=400, seed=1)
    chats = [item for item in items if item.slo_class == CHAT]
    documents = [item for item in items if item.slo_class == DOCUMENT]
    assert len(chats) == 400
    assert 0.65 <= len(chats) / len(items) <= 0.75  # 70 %, give or take two standard errors
    for item in items:
        words = len(item.prompt.split())
        assert abs(words - item.target_tokens) <= 4  # the question's separator counts two tokens elsewhere
    assert 0.15 <= sum(item.shared_tokens > 0 for item in documents) / len(documents) <= 0.35
    assert all(1 <= item.max_tokens <= 16 for item in items)


def test_the_realised_rate_is_the_rate_asked_for() -> None:
    shape = choose_shape(per_token(1 / 600), max_model_len=8192)
    items = at_rate(make_load(Words(), shape, num_short=50, seed=1), 2.5)
    assert len(items) / items[-1].at_s == pytest.approx(2.5)
    assert mean_service_s(items, lambda new, cached: float(new)) < mean_service_s(
        items, lambda new, cached: float(new + cached)
    )


def test_the_prose_is_long_enough_for_documents_that_do_not_repeat() -> None:
    assert sum(map(len, paragraphs())) > 100_000


def test_what_arrives_when_is_the_same_on_every_machine() -> None:
    slow = make_load(Words(), choose_shape(per_token(1 / 400), 8192), num_short=40, seed=5)
    fast = make_load(Words(), choose_shape(per_token(1 / 2000), 8192), num_short=40, seed=5)
    assert [(i.at_s, i.slo_class, i.shared_tokens > 0) for i in slow] == [
        (i.at_s, i.slo_class, i.shared_tokens > 0) for i in fast
    ]
    assert [i.target_tokens for i in slow] != [i.target_tokens for i in fast]


def test_every_ten_requests_hold_three_documents() -> None:
    items = make_load(Words(), choose_shape(per_token(1 / 600), 8192), num_short=70, seed=2)
    for first in range(0, len(items) - 9, 10):
        assert sum(item.slo_class == DOCUMENT for item in items[first : first + 10]) == 3
