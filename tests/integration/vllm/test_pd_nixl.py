"""Prefill and decode pods of vLLM with NIXL between them: producer preempted, KV pulled, given up, forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from support.capabilities import require
from support.pods import until_async
from support.vllm.completions import Completion, body, completion
from support.vllm.models import model_directory, small
from support.vllm.pair import NUM_TOKENS, Prompt, load, preempting, proxied, until_runs
from support.vllm.pd_client import both_legs, decode_leg, prefill_leg
from support.vllm.pod import VllmPod, vllm_pod
from support.vllm.samples import Samples, samples
from support.vllm.tokens import random_prompt

pytestmark = pytest.mark.timeout(600)  # servers start within a test's time
MAX_LEN = 8192
LEASE_S = 12
PREEMPTIONS = "flowprefill_prefill_preemptions_total"
RECEIVED = "vllm:external_prefix_cache_hits_total"
RECEIVED_BY_POD = "flowprefill_kv_transfer_received_tokens_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    prefill: VllmPod
    decode: VllmPod

    def forget(self) -> None:
        """Neither pod finds anything of before."""
        with httpx.Client() as client:
            for pod in (self.prefill, self.decode):
                answer = client.post(f"http://127.0.0.1:{pod.port}/reset_prefix_cache")
                assert answer.status_code == 200, answer.text

    def decode_metrics(self) -> Samples:
        """Of its vLLM."""
        return samples(httpx.get(f"http://127.0.0.1:{self.decode.port}/metrics").text)

    def held_blocks(self) -> float:
        """Blocks of the prefill pod that are in use."""
        told = self.prefill.metrics()
        return told.value("flowprefill_kv_blocks") - told.value("flowprefill_kv_blocks_free")


@pytest.fixture(scope="module")
def pair(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    has_nixl = [python, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('nixl') is None)"]
    found = subprocess.run(has_nixl, check=False, timeout=60).returncode == 0
    require("nixl", found, f"{python} has no nixl; run `make vllm-cpu`")
    directory = tmp_path_factory.mktemp("pd")
    model = model_directory(small("llama"))

    def pod(role: str, kv_cache_tokens: int) -> contextlib.AbstractContextManager[VllmPod]:
        return vllm_pod(
            python,
            model,
            directory / role,
            role,
            kv_cache_tokens=kv_cache_tokens,
            max_model_len=MAX_LEN,
            lease_s=LEASE_S,
            env={"VLLM_SERVER_DEV_MODE": "1"},  # for /reset_prefix_cache
        )

    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as threads:
        first = threads.submit(stack.enter_context, pod("prefill", 40_000))
        second = threads.submit(stack.enter_context, pod("decode", 60_000))
        both = Pair(prefill=first.result(), decode=second.result())
        threads.submit(asyncio.run, shake_hands(both)).result()
        yield both


async def shake_hands(pair: Pair) -> None:
    """Let the pods get to know each other while neither is busy.

    vLLM gives a handshake five seconds and fails the request after them; the next request tries anew.
    """
    prompt = random_prompt(40, seed=0)
    async with pair.prefill.client() as prefill, pair.decode.client() as decode:

        async def done() -> bool:
            request = body(prompt, 1, kv_transfer_params=await prefill_leg(prefill, prompt))
            return (await decode.post("/v1/completions", json=request)).status_code == 200

        await until_async(done, what="a handshake")


async def alone(pair: Pair, prompts: tuple[Prompt, ...]) -> list[Completion]:
    """The answers of the decode pod, which is stock vLLM, when nobody has computed a prompt for it."""
    async with pair.decode.client() as client:
        return await asyncio.gather(*(completion(client, p.token_ids, NUM_TOKENS) for p in prompts))


async def test_answers_behind_a_preempted_prefill_pod_are_those_of_one_stock_server(pair: Pair) -> None:
    prompts = load(seed=1000)
    expected = await alone(pair, prompts)
    pair.forget()
    before, preempted = pair.decode_metrics(), pair.prefill.metrics()
    async with pair.prefill.client() as prefill, pair.decode.client() as decode:

        async def ask(prompt: Prompt) -> tuple[int, ...]:
            xargs = {"ttft_slo": prompt.ttft_s}
            return await both_legs(prefill, decode, prompt.token_ids, NUM_TOKENS, vllm_xargs=xargs)

        found = await preempting(pair.prefill, prompts, ask)
    assert found == [one.token_ids for one in expected]
    assert pair.prefill.metrics().total(PREEMPTIONS) - preempted.total(PREEMPTIONS) >= 3
    assert pair.decode_metrics().total(RECEIVED) - before.total(RECEIVED) == transferable(prompts)
    await nothing_held(pair)


async def test_answers_through_our_proxy_are_the_same(pair: Pair, tmp_path: Path) -> None:
    prompts = load(seed=2000)
    expected = await alone(pair, prompts)
    pair.forget()
    before, preempted = pair.decode_metrics(), pair.prefill.metrics()
    async with proxied(tmp_path, pair.prefill.endpoint, pair.decode.endpoint) as (running, ask):
        found = await preempting(pair.prefill, prompts, ask)
        await running.at_rest()
    assert found == [one.text for one in expected]
    await until_async(lambda: is_told(pair), what="the pod's own counter")
    assert pair.prefill.metrics().total(PREEMPTIONS) - preempted.total(PREEMPTIONS) >= 3
    assert pair.decode_metrics().total(RECEIVED) - before.total(RECEIVED) == transferable(prompts)
    await nothing_held(pair)


async def test_a_pull_that_ends_while_a_long_prompt_runs_frees_its_blocks_at_once(pair: Pair) -> None:
    pulled, long = random_prompt(1000, seed=1), random_prompt(8000, seed=2)
    async with pair.prefill.client() as prefill, pair.decode.client() as decode:
        kv_params = await prefill_leg(prefill, pulled)
        async with pair.prefill.states() as states:
            running = asyncio.ensure_future(prefill_leg(prefill, long, vllm_xargs={"ttft_slo": 60.0}))
            await until_runs(states, len(long))
            answer = asyncio.ensure_future(decode_leg(decode, pulled, NUM_TOKENS, kv_params))
            async for state in states:
                assert not running.done(), "the long prompt ended before the pull was heard of"
                if state.kv_blocks - state.kv_blocks_free <= -(-len(long) // state.block_size):
                    break
        assert len(await answer) == NUM_TOKENS
        await decode_leg(decode, long, 1, await running)
    await nothing_held(pair)


async def test_a_client_that_leaves_in_the_middle_frees_its_prompt_without_a_lease(pair: Pair) -> None:
    long, short = random_prompt(8000, seed=3), random_prompt(100, seed=4)
    async with pair.prefill.client() as prefill:
        async with pair.prefill.states() as states:
            given_up = asyncio.ensure_future(prefill_leg(prefill, long, vllm_xargs={"ttft_slo": 60.0}))
            await until_runs(states, len(long))
        kv_params = asyncio.ensure_future(prefill_leg(prefill, short, vllm_xargs={"ttft_slo": 5.0}))
        given_up.cancel()
        await kv_params
        begun = asyncio.get_running_loop().time()
        await until_async(lambda: holds(pair, 4), what="only the short prompt's 4 blocks are held")
        assert asyncio.get_running_loop().time() - begun < LEASE_S / 2
        async with pair.decode.client() as decode:
            assert len(await decode_leg(decode, short, NUM_TOKENS, await kv_params)) == NUM_TOKENS
    await nothing_held(pair)


async def test_kv_that_nobody_pulls_goes_with_its_lease(pair: Pair) -> None:
    async with pair.prefill.client() as prefill:
        await prefill_leg(prefill, random_prompt(320, seed=5))
    assert pair.held_blocks() == 10
    await nothing_held(pair)


def transferable(prompts: tuple[Prompt, ...]) -> int:
    """All tokens of all prompts: NIXL's last block may be part full."""
    return sum(len(prompt.token_ids) for prompt in prompts)


async def is_told(pair: Pair) -> bool:
    """Whether the decode pod tells of as many tokens as its vLLM; it asks every few seconds."""
    return pair.decode.metrics().total(RECEIVED_BY_POD) == pair.decode_metrics().total(RECEIVED) > 0


async def holds(pair: Pair, num_blocks: int) -> bool:
    return pair.held_blocks() == num_blocks


async def nothing_held(pair: Pair) -> None:
    """Wait until both pods are idle and all blocks are free."""

    async def idle() -> bool:
        stock = pair.decode_metrics()
        return (
            pair.held_blocks() == 0
            and stock.value("vllm:num_requests_running") == 0 == stock.value("vllm:num_requests_waiting")
            and stock.value("vllm:kv_cache_usage_perc") == 0
        )

    await until_async(idle, what="no request anywhere, and every block free", limit_s=2.5 * LEASE_S)
