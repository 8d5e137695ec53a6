"""Answers whose first token came from the prefill: out as soon as the KV is in place, and continued from there."""

from __future__ import annotations

import pytest

from flowprefill.engines.protocol import GREEDY, SamplingParams
from flowprefill.execution.decode import DecodeJob
from support.decoding import BLOCK_SIZE, Rig, Where

everywhere = pytest.mark.parametrize("where", ["alone", "colocated"])


def first(rig: Rig, request_id: str) -> int:
    return rig.expected(request_id, 1)[0]


def job(rig: Rig, request_id: str, num_prompt: int, max_tokens: int, **changes: object) -> DecodeJob:
    rig.job(request_id, num_prompt, max_tokens)  # draws the prompt
    return rig.job(
        request_id, num_prompt, max_tokens, **{"first_token_id": first(rig, request_id), **changes}
    )


@everywhere
@pytest.mark.parametrize("num_prompt", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 5 * BLOCK_SIZE])
def test_the_answer_is_the_same_with_one_step_less(where: Where, num_prompt: int) -> None:
    def script(rig: Rig) -> None:
        rig.decoder.submit(job(rig, "a", num_prompt, 6))
        rig.clock.sleep_until_s(10)
        assert rig.tokens["a"] == rig.expected("a", 6)
        assert rig.ends["a"] == ("length", "")
        assert len(rig.engine.batch_sizes) == 5
        assert rig.decoder.state().num_tokens == 6

    Rig(where).play(script)


@everywhere
def test_it_is_out_before_any_step_and_while_others_are_in_theirs(where: Where) -> None:
    def script(rig: Rig) -> None:
        rig.decoder.submit(job(rig, "long", 20, 12))
        rig.clock.sleep_until_s(rig.token_times_s["long"][0] + 1e-4)  # inside a step of the other
        steps = rig.decoder.state().num_steps
        rig.decoder.submit(job(rig, "late", 9, 3))
        if where == "alone":
            assert rig.tokens["late"] == [first(rig, "late")]
            assert rig.decoder.state().num_steps == steps
        rig.clock.sleep_until_s(10)
        assert rig.tokens["late"] == rig.expected("late", 3)
        assert rig.tokens["long"] == rig.expected("long", 12)

    Rig(where).play(script)


@everywhere
def test_an_answer_of_one_token_or_that_stops_at_once_needs_no_step(where: Where) -> None:
    def script(rig: Rig) -> None:
        rig.decoder.submit(job(rig, "one", 7, 1))
        stop = first(rig, "one")
        rig.prompts["stops"] = rig.prompts["one"]
        rig.decoder.submit(job(rig, "stops", 7, 5, stop_token_ids=frozenset({stop})))
        rig.clock.sleep_until_s(1)
        assert rig.tokens == {"one": [stop], "stops": [stop]}
        assert rig.ends == {"one": ("length", ""), "stops": ("stop", "")}
        assert rig.engine.batch_sizes == []

    Rig(where).play(script)


@everywhere
def test_a_whole_cached_prompt_needs_no_fill_of_its_own(where: Where) -> None:
    def script(rig: Rig) -> None:
        rig.decoder.submit(hashed(rig, "a"))
        rig.clock.sleep_until_s(1)
        rig.prompts["b"] = rig.prompts["a"]
        rig.decoder.submit(hashed(rig, "b"))
        rig.clock.sleep_until_s(2)
        assert (
            rig.admitted["b"][1] == 3 * BLOCK_SIZE
        )  # the last prompt token's block as well: no step writes it
        assert rig.tokens["b"] == rig.tokens["a"] == rig.expected("a", 4)

    def hashed(rig: Rig, name: str) -> DecodeJob:
        return job(rig, name, 3 * BLOCK_SIZE, 4, prefix_hashes=(11, 12, 13))

    Rig(where).play(script)


@everywhere
def test_a_seeded_answer_goes_on_with_the_second_draw(where: Where) -> None:
    sampling = SamplingParams(temperature=1.0, seed=7)

    def script(rig: Rig) -> None:
        rig.decoder.submit(rig.job("whole", 9, 6, sampling=sampling))
        rig.clock.sleep_until_s(1)
        rig.prompts["rest"] = rig.prompts["whole"]
        chosen = rig.tokens["whole"][0]
        rig.decoder.submit(rig.job("rest", 9, 6, sampling=sampling, first_token_id=chosen))
        rig.clock.sleep_until_s(2)
        assert rig.tokens["rest"] == rig.tokens["whole"]

    Rig(where).play(script)


def test_it_cannot_come_with_a_minimum() -> None:
    with pytest.raises(ValueError, match="min_tokens 2; accepted is 0"):
        DecodeJob(
            request_id="a",
            num_prompt_tokens=1,
            last_token_id=0,
            first_token_id=1,
            max_tokens=3,
            min_tokens=2,
            sampling=GREEDY,
        )
