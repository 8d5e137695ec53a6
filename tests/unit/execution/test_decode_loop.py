"""Decoding with continuous batching: the same behaviour in a thread of its own and beside prefill.

The simulated model is a fixed function of the tokens before, so every answer can be computed without any KV.
"""

from __future__ import annotations

import pytest

from flowprefill.engines.protocol import (
    SamplingParams,
)
from flowprefill.errors import InvalidRequest, QueueFull, Unavailable
from flowprefill.scheduling.kv import prefix_hashes
from support.decoding import BLOCK_SIZE, Rig, Where

everywhere = pytest.mark.parametrize("where", ["alone", "colocated"])


@everywhere
def test_answers_are_those_of_the_model_alone_and_join_and_leave_between_steps(where: Where) -> None:
    def script(rig: Rig) -> None:
        lengths = {"a": (5, 9), "b": (13, 2), "c": (8, 6), "d": (1, 5), "e": (4, 1), "f": (21, 4)}
        for number, (name, (num_prompt, max_tokens)) in enumerate(lengths.items()):
            rig.clock.sleep_until_s(number * 0.003)
            rig.decoder.submit(rig.job(name, num_prompt, max_tokens))
        rig.clock.sleep_until_s(10)
        for name, (_, max_tokens) in lengths.items():
            assert rig.tokens[name] == rig.expected(name, max_tokens)
            assert rig.ends[name] == ("length", "")
        assert max(rig.engine.batch_sizes) > 1
        state = rig.decoder.state()
        assert (state.queued, state.filling, state.active) == (0, 0, 0)
        assert state.num_tokens == 27

    Rig(where).play(script)


@everywhere
def test_a_batch_never_exceeds_its_size_and_nobody_waits_forever(where: Where) -> None:
    def script(rig: Rig) -> None:
        for number in range(8):
            rig.decoder.submit(rig.job(f"j{number}", 4, 5))
        rig.clock.sleep_until_s(10)
        assert max(rig.engine.batch_sizes) == 2
        for number in range(8):
            assert rig.tokens[f"j{number}"] == rig.expected(f"j{number}", 5)

    Rig(where, max_batch_size=2, num_blocks=200).play(script)


@everywhere
def test_jobs_wait_for_blocks_in_order_and_a_large_one_is_not_overtaken(where: Where) -> None:
    def script(rig: Rig) -> None:
        rig.decoder.submit(rig.job("first", 20, 20))  # 10 of 12 blocks
        rig.decoder.submit(rig.job("large", 30, 10))  # 10 blocks
        rig.decoder.submit(rig.job("small", 2, 2))  # 1 block, but behind the large one
        rig.clock.sleep_until_s(0.001)
        assert list(rig.admitted) == ["first"]
        assert rig.decoder.state().queued == 2
        rig.clock.sleep_until_s(10)
        assert list(rig.admitted) == ["first", "large", "small"]
        assert rig.ends == dict.fromkeys(["first", "small", "large"], ("length", ""))
        assert rig.tokens["large"] == rig.expected("large", 10)

    Rig(where, num_blocks=12).play(script)


@everywhere
def test_what_can_never_fit_or_finds_the_queue_full_is_refused(where: Where) -> None:
    def script(rig: Rig) -> None:
        with pytest.raises(
            InvalidRequest, match=r"need 13 KV blocks \(30 \+ 20 tokens\); the decode pool has 12"
        ):
            rig.decoder.submit(rig.job("huge", 30, 20))
        rig.fill = False
        rig.decoder.submit(rig.job("fills the pool", 20, 28))
        rig.clock.sleep_until_s(1)
        for number in range(3):
            rig.decoder.submit(rig.job(f"q{number}", 2, 2))
        with pytest.raises(QueueFull, match="3 answers wait to be decoded; the queue takes 3"):
            rig.decoder.submit(rig.job("one more", 2, 2))
        with pytest.raises(ValueError, match="'q0' is in use"):
            rig.decoder.submit(rig.job("q0", 2, 2))
        rig.bring("fills the pool")
        rig.fill = True
        rig.decoder.filled("fills the pool")
        rig.clock.sleep_until_s(10)
        assert {reason for reason, _ in rig.ends.values()} == {"length"}
        assert len(rig.ends) == 4

    Rig(where, num_blocks=12, queue_limit=3).play(script)


@everywhere
def test_a_stop_token_ends_the_answer_and_is_banned_until_enough_tokens_are_out(where: Where) -> None:
    def script(rig: Rig) -> None:
        job = rig.job("a", 6, 30)
        plain = rig.expected("a", 30)
        stop = plain[3]
        assert plain.index(stop) == 3
        rig.decoder.submit(rig.job("a", 6, 30, stop_token_ids=frozenset({stop})))
        rig.prompts["b"] = rig.prompts["a"]
        rig.decoder.submit(rig.job("b", 6, 30, stop_token_ids=frozenset({stop}), min_tokens=10))
        rig.clock.sleep_until_s(10)
        assert rig.tokens["a"] == plain[:4]
        assert rig.ends["a"] == ("stop", "")
        assert rig.tokens["b"][:3] == plain[:3]
        assert stop not in rig.tokens["b"][:10]
        assert len(rig.tokens["b"]) > 10
        assert job.num_reserved_tokens == 36

    Rig(where).play(script)


@everywhere
def test_equal_seeds_give_equal_answers_and_others_differ(where: Where) -> None:
    def script(rig: Rig) -> None:
        rig.job("a", 6, 12)
        for name, seed in {"a": 1, "b": 1, "c": 2}.items():
            rig.prompts[name] = rig.prompts["a"]
            sampling = SamplingParams(temperature=1.0, seed=seed)
            rig.decoder.submit(rig.job(name, 6, 12, sampling=sampling))
        rig.clock.sleep_until_s(10)
        assert rig.tokens["a"] == rig.tokens["b"]
        assert rig.tokens["a"] != rig.tokens["c"]

    Rig(where).play(script)


@everywhere
def test_cancelling_a_waiting_a_filling_and_a_running_job_frees_each_in_its_time(where: Where) -> None:
    def script(rig: Rig) -> None:
        rig.fill = False
        rig.decoder.submit(rig.job("filling", 20, 20))
        rig.clock.sleep_until_s(1)
        rig.decoder.submit(rig.job("waiting", 20, 20))
        rig.clock.sleep_until_s(2)
        rig.decoder.cancel("waiting")
        rig.decoder.cancel("filling")
        rig.decoder.cancel("nobody")
        rig.clock.sleep_until_s(3)
        assert rig.ends == {"waiting": ("cancelled", "")}
        assert rig.kv.num_free == 2  # somebody may still write the filling job's blocks
        rig.decoder.filled("filling")
        rig.clock.sleep_until_s(4)
        assert rig.ends["filling"] == ("cancelled", "")
        assert rig.kv.num_free == 12
        rig.fill = True
        rig.decoder.submit(rig.job("running", 20, 20))
        rig.clock.sleep_until_s(4.01)
        rig.decoder.cancel("running")
        rig.clock.sleep_until_s(10)
        assert rig.ends["running"] == ("cancelled", "")
        assert 0 < len(rig.tokens["running"]) < 20

    Rig(where, num_blocks=12).play(script)


@everywhere
def test_a_fill_that_fails_ends_its_job_with_the_reason(where: Where) -> None:
    def script(rig: Rig) -> None:
        rig.fill = False
        rig.decoder.submit(rig.job("a", 5, 5))
        rig.clock.sleep_until_s(1)
        rig.decoder.fill_failed("a", "the prefill pod is gone")
        rig.decoder.filled("a")  # too late, and ignored
        rig.clock.sleep_until_s(2)
        assert rig.ends == {"a": ("error", "the prefill pod is gone")}

    Rig(where).play(script)


@everywhere
def test_an_engine_error_ends_only_the_sequences_that_cause_it(where: Where) -> None:
    def script(rig: Rig) -> None:
        for name in ("a", "bad", "c"):
            rig.decoder.submit(rig.job(name, 5, 40))
        rig.clock.sleep_until_s(0.02)
        rig.engine.breaks.add("bad")
        rig.clock.sleep_until_s(10)
        reason, detail = rig.ends["bad"]
        assert reason == "error"
        assert "RuntimeError: ['bad'] broke" in detail
        assert 0 < len(rig.tokens["bad"]) < 40
        for name in ("a", "c"):
            assert rig.ends[name] == ("length", "")
            assert rig.tokens[name] == rig.expected(name, 40)

    Rig(where).play(script)


@everywhere
def test_kv_that_never_came_is_an_error_and_not_an_answer(where: Where) -> None:
    def script(rig: Rig) -> None:
        rig.fill = False
        rig.decoder.submit(rig.job("a", 9, 5))
        rig.clock.sleep_until_s(1)
        rig.decoder.filled("a")  # a lie
        rig.clock.sleep_until_s(2)
        reason, detail = rig.ends["a"]
        assert reason == "error"
        assert "KV that is not there" in detail
        assert "a" not in rig.tokens

    Rig(where).play(script)


@everywhere
def test_a_prompt_that_the_pool_holds_needs_only_its_rest(where: Where) -> None:
    def script(rig: Rig) -> None:
        first = rig.job("a", 14, 6)
        hashes = prefix_hashes(rig.prompts["a"], BLOCK_SIZE)
        rig.decoder.submit(rig.job("a", 14, 6, prefix_hashes=hashes))
        rig.clock.sleep_until_s(1)
        rig.prompts["b"] = rig.prompts["a"]
        rig.decoder.submit(rig.job("b", 14, 6, prefix_hashes=hashes))
        rig.clock.sleep_until_s(2)
        assert rig.admitted["a"][1] == 0
        assert rig.admitted["b"][1] == 12
        assert len(rig.admitted["b"][0]) == 4
        assert rig.tokens["a"] == rig.tokens["b"] == rig.expected("a", first.max_tokens)

    Rig(where).play(script)


@everywhere
def test_the_block_of_the_last_prompt_token_is_never_shared(where: Where) -> None:
    def script(rig: Rig) -> None:
        rig.job("long", 20, 4)
        rig.prompts["short"] = rig.prompts["long"][:12]  # three full blocks, all of them in the pool by then
        for name, num_tokens in {"long": 20, "short": 12}.items():
            hashes = prefix_hashes(rig.prompts[name], BLOCK_SIZE)
            rig.decoder.submit(rig.job(name, num_tokens, 4, prefix_hashes=hashes))
            rig.clock.sleep_until_s(rig.clock.now_s() + 0.005)
        rig.clock.sleep_until_s(1)
        assert rig.admitted["short"][1] == 8
        assert rig.admitted["short"][0][:2] == rig.admitted["long"][0][:2]
        assert rig.admitted["short"][0][2] != rig.admitted["long"][0][2]
        assert rig.tokens["short"] == rig.expected("short", 4)

    Rig(where).play(script)


@everywhere
def test_closing_ends_every_job_and_refuses_new_ones(where: Where) -> None:
    rig = Rig(where)

    def script(rig: Rig) -> None:
        rig.fill = False
        rig.decoder.submit(rig.job("a", 5, 5))
        rig.clock.sleep_until_s(1)

    thread = rig.clock.start_thread(lambda: script(rig), name="script")
    thread.join(10)
    rig.close()
    assert rig.ends == {"a": ("cancelled", "")}
    with pytest.raises(Unavailable):
        rig.decoder.submit(rig.job("b", 5, 5))
    rig.decoder.filled("a")
    rig.decoder.cancel("a")


def test_a_decode_thread_that_breaks_ends_its_jobs_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig("alone")

    def script(rig: Rig) -> None:
        def breaks(results: object) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(rig.loop._batch, "end_step", breaks)
        rig.decoder.submit(rig.job("a", 5, 5))
        rig.clock.sleep_until_s(1)
        assert rig.ends["a"][0] == "error"
        assert isinstance(rig.loop.crashed, ZeroDivisionError)
        with pytest.raises(Unavailable, match="must be restarted"):
            rig.decoder.submit(rig.job("b", 5, 5))

    rig.play(script)
