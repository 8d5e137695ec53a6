from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowprefill.openai.requests import ChatCompletionRequest, CompletionRequest
from flowprefill.proxy.estimate import MAX_TOKENIZED_CHARS, Estimator
from flowprefill.scheduling.kv import prefix_hashes


def completion(prompt: object) -> CompletionRequest:
    return CompletionRequest(model="m", prompt=prompt)


def test_token_ids_are_counted_exactly_and_hashed_as_pods_hash_them():
    ids = list(range(50))
    estimate = Estimator(block_size=16, salt=("m",)).estimate(completion(ids), ids)
    assert (estimate.num_tokens, estimate.source) == (50, "ids")
    assert estimate.hashes == prefix_hashes(ids, 16, salt=("m",))
    assert len(estimate.hashes) == 3


def test_text_without_a_tokenizer_is_bytes_over_four_and_never_nothing():
    estimator = Estimator(block_size=16)
    assert estimator.estimate(completion("x" * 400), "x" * 400).num_tokens == 100
    assert estimator.estimate(completion("é" * 400), "é" * 400).num_tokens == 200
    assert estimator.estimate(completion(""), "").num_tokens == 1
    assert estimator.estimate(completion("\ud800"), "\ud800").num_tokens == 1


def test_a_chat_counts_all_its_messages():
    request = ChatCompletionRequest(
        model="m",
        messages=[{"role": "system", "content": "x" * 40}, {"role": "user", "content": "y" * 40}],
    )
    assert Estimator(block_size=16).estimate(request, None).num_tokens == 20 + 2 * 8


def test_a_tokenizer_gives_counts_and_hashes():
    estimator = Estimator(block_size=2, tokenize=lambda request, prompt: [len(w) for w in prompt.split()])
    estimate = estimator.estimate(completion("a bb ccc dddd"), "a bb ccc dddd")
    assert (estimate.num_tokens, estimate.hashes) == (4, prefix_hashes([1, 2, 3, 4], 2))


def test_a_tokenizer_that_fails_falls_back_to_bytes():
    def broken(request: object, prompt: object) -> list[int]:
        raise ValueError("cannot render")

    estimate = Estimator(block_size=2, tokenize=broken).estimate(completion("x" * 40), "x" * 40)
    assert (estimate.num_tokens, estimate.source) == (10, "bytes")


def test_a_tokenizer_that_pods_disagree_with_is_given_up():
    estimator = Estimator(block_size=2, tokenize=lambda request, prompt: [1] * 10)
    text = "x" * 400

    def pod_counts(number: int) -> None:
        estimator.measured(estimator.estimate(completion(text), text), number)

    for number in (30, 30, 10, 30, 30):  # never three in a row
        pod_counts(number)
    assert estimator.estimate(completion(text), text).source == "tokenizer"
    for _ in range(2):
        pod_counts(30)
    assert estimator.estimate(completion(text), text).source == "bytes"
    for _ in range(100):  # the last of the first counts' error shrinks by 5 % a count
        pod_counts(300)
    assert estimator.estimate(completion(text), text).num_tokens == pytest.approx(300, abs=3)


def test_the_ratio_follows_what_pods_count():
    estimator = Estimator(block_size=16)
    for _ in range(200):
        estimate = estimator.estimate(completion("x" * 400), "x" * 400)
        estimator.measured(estimate, 160)
    assert estimator.estimate(completion("x" * 400), "x" * 400).num_tokens == pytest.approx(160, abs=2)


@given(st.lists(st.tuples(st.integers(1, 10_000), st.integers(-5, 10**9)), max_size=200))
def test_no_count_of_a_pod_makes_estimates_absurd(observations):
    estimator = Estimator(block_size=16)
    for size, counted in observations:
        estimator.measured(estimator.estimate(completion("x" * size), "x" * size), counted)
    assert 20 <= estimator.estimate(completion("x" * 400), "x" * 400).num_tokens <= 500


def test_a_prompt_too_long_to_be_worth_counting_is_estimated_from_its_size():
    counted: list[int] = []

    def tokenize(request: object, prompt: object) -> list[int]:
        counted.append(len(str(prompt)))
        return [1] * 10

    estimator = Estimator(block_size=16, tokenize=tokenize)
    most = "x" * MAX_TOKENIZED_CHARS
    assert estimator.estimate(completion(most), most).source == "tokenizer"
    longer = most + "x"
    estimate = estimator.estimate(completion(longer), longer)
    assert (estimate.source, estimate.num_tokens) == ("bytes", round(len(longer) / 4))
    assert counted == [MAX_TOKENIZED_CHARS]
