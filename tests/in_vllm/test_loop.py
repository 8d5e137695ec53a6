"""The loop: our scheduler's decisions on vLLM's engine core, with clients that come and go."""

from __future__ import annotations

import random
import time

import pytest

from flowprefill.server.vllm.core_settings import DEFAULT_LIVE
from support.vllm.bench import Bench
from support.vllm.loop_bench import LoopBench
from support.vllm.tokens import random_prompt

VARIANTS = ("llama", "qwen3_moe", "llama ranks")

CALM = DEFAULT_LIVE.model_copy(update={"recompute_suspended_under_pressure": False})


def test_a_short_prompt_overtakes_a_long_one_which_goes_on_where_it_stood(bench: Bench) -> None:
    long, short = random_prompt(4000, seed=1), random_prompt(40, seed=2)
    with LoopBench(bench) as loop:
        loop.send("long", long, ttft_slo=60.0)
        loop.until(lambda: bool(loop.steps), "the long prompt runs")
        loop.send("short", short, ttft_slo=0.5)
        loop.until_finished()
        assert loop.num_preemptions == 1
        assert loop.heard["short"].token_times_s < loop.heard["long"].token_times_s
    bench.same_without_pauses({"long": long, "short": short})


def test_fcfs_without_preemption_overtakes_nobody(bench: Bench) -> None:
    live = DEFAULT_LIVE.model_copy(update={"policy": "fcfs", "preemption": "none"})
    with LoopBench(bench, live) as loop:
        loop.send("long", random_prompt(4000, seed=1), ttft_slo=60.0)
        loop.until(lambda: bool(loop.steps), "the long prompt runs")
        loop.send("short", random_prompt(40, seed=2), ttft_slo=0.1)
        loop.until_finished()
        assert loop.num_requested == 0
        assert loop.heard["long"].token_times_s < loop.heard["short"].token_times_s


def test_answers_go_on_while_a_long_prompt_runs(bench: Bench) -> None:
    with LoopBench(bench) as loop:
        loop.send("chat", random_prompt(30, seed=1), max_tokens=200)
        loop.until(lambda: len(loop.heard["chat"].tokens) > 3, "the answer has begun")
        before = len(loop.heard["chat"].tokens)
        loop.send("long", random_prompt(4000, seed=2), ttft_slo=60.0)
        loop.until_finished("long")
        during = len(loop.heard["chat"].tokens) - before
        assert during > 0, "steps with a TBT target preempt the long prompt"
        assert loop.num_preemptions > 0
        loop.until_finished()
        assert len(loop.heard["chat"].tokens) == 200


def test_a_client_that_leaves_frees_what_it_held(bench: Bench) -> None:
    live = DEFAULT_LIVE
    with LoopBench(bench, live) as loop:
        loop.send("suspended", random_prompt(3000, seed=1), ttft_slo=60.0)
        loop.until(lambda: len(loop.steps) == 1, "it runs")
        loop.send("running", random_prompt(3500, seed=2), ttft_slo=10.0)
        loop.until(lambda: loop.num_preemptions == 1, "it is suspended")
        loop.send("waiting", random_prompt(2000, seed=3), ttft_slo=50.0)
        loop.leave("suspended", "waiting", "running")
        loop.send("last", random_prompt(64, seed=4))
        loop.until_finished("last")
        loop.until(lambda: not bench.vllm.requests, "all is freed")


def test_an_error_of_the_engine_fails_its_batch_and_nothing_else(bench: Bench) -> None:
    with LoopBench(bench) as loop:
        with bench.failing_at(3, "the operator broke"):
            loop.send("broken", random_prompt(100, seed=1))
            loop.until_finished("broken")
        assert loop.heard["broken"].finish_reason == "error"
        assert loop.heard["broken"].tokens == []
        loop.send("well", random_prompt(100, seed=1), max_tokens=3)
        loop.until_finished("well")
        assert len(loop.heard["well"].tokens) == 3


def test_a_full_queue_refuses(bench: Bench) -> None:
    live = DEFAULT_LIVE.model_copy(update={"queue_limit": 1})
    with LoopBench(bench, live) as loop:
        loop.send("long", random_prompt(3000, seed=1), ttft_slo=60.0)
        loop.until(lambda: bool(loop.steps), "it runs")
        for k in range(3):
            loop.send(f"later-{k}", random_prompt(3000, seed=k), ttft_slo=100.0 + k)
        loop.until_finished("later-1", "later-2")
        assert {loop.heard[f"later-{k}"].finish_reason for k in (1, 2)} == {"error"}
        loop.until_finished()
        assert loop.heard["later-0"].finish_reason == "length"


def test_more_requests_than_blocks_all_end(bench: Bench) -> None:
    with LoopBench(bench) as loop:
        for k in range(24):  # 24 x (1,500 + 40) tokens; the pool has 12,800
            loop.send(f"r{k}", random_prompt(1500, seed=k), max_tokens=40, ttft_slo=5.0 + k % 3)
        loop.until_finished()
        assert {len(heard.tokens) for heard in loop.heard.values()} == {40}


def test_settings_change_while_it_runs(bench: Bench) -> None:
    with LoopBench(bench) as loop:
        loop.loop.reconfigure(DEFAULT_LIVE.model_copy(update={"chunk_tokens": 512, "max_suspended": 50}))
        loop.send("a", random_prompt(2000, seed=1))
        loop.until_finished()
        assert len(loop.steps) == 4
        assert loop.scheduler.settings.max_suspended == bench.num_slots - 1


def test_a_shutdown_ends_what_is_under_way(bench: Bench) -> None:
    with LoopBench(bench) as loop:
        loop.send("a", random_prompt(4000, seed=1), ttft_slo=60.0)
        loop.until(lambda: bool(loop.steps), "it runs")
    assert loop.heard["a"].finish_reason == "abort"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", ["s-edf", "srpt"])
def test_two_hundred_random_requests(bench: Bench, seed: int, policy: str) -> None:
    chance = random.Random(seed)
    live = CALM.model_copy(update={"policy": policy, "chunk_tokens": chance.choice([None, 384])})
    shared = [random_prompt(160, seed=1000 + seed), random_prompt(64, seed=2000 + seed)]
    prompts = {
        f"r{k}": chance.choice([[], [], *shared])
        + random_prompt(chance.choice([5, 40, 150, 600, 1200]), seed=k)
        for k in range(200)
    }
    gone = set(chance.sample(sorted(prompts), 40))
    with LoopBench(bench, live) as loop:
        for name, prompt in prompts.items():
            loop.send(
                name, prompt, max_tokens=chance.randint(1, 4), ttft_slo=chance.choice([0.05, 0.3, 2.0, 30.0])
            )
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.02)
            if name in gone:
                loop.leave(name)
        loop.until_finished(*sorted(prompts.keys() - gone))
        assert loop.num_preemptions > 0, "else nothing is tested"
    bench.same_without_pauses(prompts, max_tokens=4)
    bench.abort(*list(bench.vllm.requests))
