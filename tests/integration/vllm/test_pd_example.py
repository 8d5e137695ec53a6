"""Prefill and decode on two servers over a shared folder (vLLM's ExampleConnector): our preemptive engine computes prompts, stock vLLM answers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from support.pods import until_async
from support.vllm.completions import Completion, completion
from support.vllm.models import model_directory, small
from support.vllm.pair import BLOCK, NUM_TOKENS, Prompt, load, preempting, proxied, stock_endpoint, until_runs
from support.vllm.pd_client import both_legs, decode_leg, prefill_leg
from support.vllm.pod import VllmPod, kv_transfer, vllm_pod
from support.vllm.samples import Samples, samples
from support.vllm.server import VllmServer, vllm_server

pytestmark = pytest.mark.timeout(600)  # servers start within a test's time
MAX_LEN = 8192
DEV = {"VLLM_SERVER_DEV_MODE": "1"}
"""For /reset_prefix_cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """`ours` is the prefill pod where it is no stock server."""

    prefill_port: int
    ours: VllmPod | None
    decode: VllmServer
    folder: Path

    @property
    def prefill(self) -> VllmPod:
        assert self.ours is not None, "this pair is stock"
        return self.ours

    def forget(self) -> None:
        """Neither server finds anything of before."""
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        with httpx.Client() as client:
            for port in (self.prefill_port, self.decode.port):
                answer = client.post(f"http://127.0.0.1:{port}/reset_prefix_cache")
                assert answer.status_code == 200, answer.text

    def decode_metrics(self) -> Samples:
        return samples(httpx.get(f"{self.decode.url}/metrics").text)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("pd")
    (found / "kv").mkdir()
    return found


def stock_flags(directory: Path, role: str) -> list[str]:
    return [
        *kv_transfer("ExampleConnector", role, shared_storage_path=str(directory / "kv")),
        *("--block-size", str(BLOCK)),
        *("--max-model-len", str(MAX_LEN), "--max-num-batched-tokens", str(MAX_LEN)),
    ]


@pytest.fixture(scope="module")
def decode(python: Path, directory: Path) -> Iterator[VllmServer]:
    model, log = model_directory(small("llama")), directory / "decode.log"
    with vllm_server(python, model, log, flags=stock_flags(directory, "kv_consumer"), env=DEV) as server:
        yield server


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, python: Path, directory: Path, decode: VllmServer) -> Iterator[Pair]:
    """One decode server for all; the prefill side is one or the other, not both at once."""
    model, folder = model_directory(small("llama")), directory / "kv"
    if request.param == "stock":
        log, flags = directory / "prefill.log", stock_flags(directory, "kv_producer")
        with vllm_server(python, model, log, flags=flags, env=DEV) as server:
            yield Pair(prefill_port=server.port, ours=None, decode=decode, folder=folder)
        return
    flags = kv_transfer("ExampleConnector", shared_storage_path=str(folder))
    with vllm_pod(
        python,
        model,
        directory / "prefill",
        "prefill",
        flags=flags,
        kv_cache_tokens=40_000,
        max_model_len=MAX_LEN,
        env=DEV,
    ) as pod:
        yield Pair(prefill_port=pod.port, ours=pod, decode=decode, folder=folder)


ours = pytest.mark.parametrize("pair", ["ours"], indirect=True)
stock = pytest.mark.parametrize("pair", ["stock"], indirect=True)


def transferable(prompts: tuple[Prompt, ...]) -> int:
    """Tokens in full blocks, of which the connector never sends the last token's.

    It looks for a folder under one token less than it stores; a prompt that is one token longer than full blocks is not found.
    """
    return sum((n - 1) // BLOCK * BLOCK for p in prompts if (n := len(p.token_ids)) and (n - 1) % BLOCK)


async def alone(pair: Pair, prompts: tuple[Prompt, ...]) -> list[Completion]:
    """The answers of the decode server when nobody has computed a prompt for it."""
    async with pair.decode.client() as client:
        return await asyncio.gather(*(completion(client, p.token_ids, NUM_TOKENS) for p in prompts))


@ours
async def test_answers_behind_a_preempted_prefill_pod_are_those_of_one_stock_server(pair: Pair) -> None:
    prompts = load(seed=1000)
    pair.forget()
    expected = await alone(pair, prompts)
    pair.forget()
    before, preempted = pair.decode_metrics(), pair.prefill.metrics()
    async with pair.prefill.client() as prefill, pair.decode.client() as decode:

        async def ask(prompt: Prompt) -> tuple[int, ...]:
            xargs = {"ttft_slo": prompt.ttft_s}
            return await both_legs(prefill, decode, prompt.token_ids, NUM_TOKENS, vllm_xargs=xargs)

        found = await preempting(pair.prefill, prompts, ask)
    assert found == [one.token_ids for one in expected]
    name = "flowprefill_prefill_preemptions_total"
    assert pair.prefill.metrics().total(name) - preempted.total(name) >= 3
    name = "vllm:external_prefix_cache_hits_total"
    assert pair.decode_metrics().total(name) - before.total(name) == transferable(prompts)
    await nothing_held(pair)


@ours
async def test_answers_through_our_proxy_are_the_same(pair: Pair, tmp_path: Path) -> None:
    prompts = load(seed=2000)
    pair.forget()
    expected = await alone(pair, prompts)
    pair.forget()
    before, preempted = pair.decode_metrics(), pair.prefill.metrics()
    async with proxied(tmp_path, pair.prefill.endpoint, stock_endpoint("decode", pair.decode.port)) as (
        running,
        ask,
    ):
        found = await preempting(pair.prefill, prompts, ask)
        await running.at_rest()
        answered = await running.metrics()
    assert found == [one.text for one in expected]
    assert sum(
        v for name, v in answered.items() if name.startswith("flowprefill_requests_total{code=200")
    ) == len(prompts)
    name = "flowprefill_prefill_preemptions_total"
    assert pair.prefill.metrics().total(name) - preempted.total(name) >= 3
    name = "vllm:external_prefix_cache_hits_total"
    assert pair.decode_metrics().total(name) - before.total(name) == transferable(prompts)
    await nothing_held(pair)


@ours
async def test_a_prompt_given_up_half_way_is_computed_by_decode_itself(pair: Pair) -> None:
    """The stock connector would show the layers that are there, and a decode server dies of those that are not."""
    (long, *shorts) = load(seed=3000, num_long=1)
    pair.forget()
    (expected,) = await alone(pair, (long,))
    pair.forget()
    before = pair.decode_metrics()
    async with pair.prefill.client() as prefill, pair.decode.client() as decode:

        async def first_leg(prompt: Prompt) -> dict[str, object]:
            xargs = {"ttft_slo": prompt.ttft_s}
            return await prefill_leg(prefill, prompt.token_ids, vllm_xargs=xargs)

        async with pair.prefill.states() as states:
            given_up = asyncio.ensure_future(first_leg(long))
            await until_runs(states, len(long.token_ids))
        others = [asyncio.ensure_future(first_leg(short)) for short in shorts]
        given_up.cancel()
        await asyncio.gather(*others)
        await nothing_held(pair)
        assert [folder.name for folder in pair.folder.iterdir() if "." in folder.name] == []
        found = await decode_leg(decode, long.token_ids, NUM_TOKENS, {})
    assert found == expected.token_ids
    name = "vllm:external_prefix_cache_hits_total"
    assert pair.decode_metrics().total(name) == before.total(name)
    await nothing_held(pair)


@stock
async def test_answers_of_a_stock_pair_through_our_proxy_are_the_same(pair: Pair, tmp_path: Path) -> None:
    """Servers without a state stream get the least outstanding work."""
    prompts = load(seed=4000)
    pair.forget()
    expected = await alone(pair, prompts)
    pair.forget()
    before = pair.decode_metrics()
    endpoints = stock_endpoint("prefill", pair.prefill_port), stock_endpoint("decode", pair.decode.port)
    async with proxied(tmp_path, *endpoints) as (running, ask):
        found = await asyncio.gather(*map(ask, prompts))
        await running.at_rest()
    assert found == [one.text for one in expected]
    name = "vllm:external_prefix_cache_hits_total"
    assert pair.decode_metrics().total(name) - before.total(name) == transferable(prompts)


async def nothing_held(pair: Pair) -> None:
    """Wait until both servers are idle and all blocks are free."""

    async def idle() -> bool:
        ours, stock = pair.prefill.metrics(), pair.decode_metrics()
        return (
            ours.value("flowprefill_kv_blocks_free") == ours.value("flowprefill_kv_blocks")
            and stock.value("vllm:num_requests_running") == 0 == stock.value("vllm:num_requests_waiting")
            and stock.value("vllm:kv_cache_usage_perc") == 0
        )

    await until_async(idle, what="no request anywhere, and every block free")
