"""A client that leaves at any moment frees its work: nothing stays in a pool, a queue or a batch.

Prefills here take minutes if nobody stops them (a slow cost model with many preemption points), so a pool that is
whole again within a test's wait was freed because the client left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from flowprefill.clock import MonotonicClock
from flowprefill.engines.simulated.engine import SimulatedEngine
from flowprefill.engines.simulated.presets import preset
from support.pods import (
    MODEL,
    RunningPod,
    decode_leg,
    pod_config,
    prefill_leg,
    prefilled,
    running_pair,
    running_pod,
    simulated_engine,
    stream_events,
    until,
    until_async,
)

LONG = "a long document " * 100
LATE = {"ttft_slo": 1000.0, "ttft_target": 1000.0, "slo_class": "document"}
SOON = {"ttft_slo": 900.0, "ttft_target": 900.0, "slo_class": "chat"}


def slow_engine(factor: float = 500.0) -> SimulatedEngine:
    return SimulatedEngine(
        preset("tiny").scaled(factor),
        MonotonicClock(),
        num_kv_blocks=512,
        block_size=16,
        max_model_len=4096,
        max_gap_s=0.01,
        vocab_size=1000,
    )


@asynccontextmanager
async def leaving(
    pod: RunningPod, body: dict[str, Any], path: str = "/v1/completions"
) -> AsyncIterator[None]:
    """A client that sends `body` and closes its connection at the end of the block, without an answer."""
    async with httpx.AsyncClient(base_url=pod.api.base_url, timeout=60) as client:
        request = asyncio.ensure_future(client.post(path, json=body))
        try:
            yield
        finally:
            assert not request.done(), "the answer came before the client left"
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)


async def state(pod: RunningPod) -> dict[str, Any]:
    """The first line of the pod's state stream."""
    async with pod.admin.stream("GET", "/v1/state") as lines:
        async for line in lines.aiter_lines():
            import json

            found: dict[str, Any] = json.loads(line)
            return found
    raise AssertionError("no state")


async def until_state(pod: RunningPod, what: str, holds: Any) -> None:
    async def check() -> bool:
        return bool(holds(await state(pod)))

    await until_async(check, what=what)


async def all_free(pod: RunningPod) -> None:
    await pod.until_metric("flowprefill_kv_blocks_free", pod.engine.spec.num_kv_blocks)


async def test_a_running_prefill_is_unwound(tmp_path: Path) -> None:
    async with running_pod("prefill", tmp_path, engine=slow_engine()) as pod:
        async with leaving(pod, prefill_leg(LONG)):
            await until_state(pod, "running", lambda s: s.get("running"))
            assert await pod.metric("flowprefill_kv_blocks_free") < 512
        await all_free(pod)
        await until_state(pod, "idle", lambda s: not s.get("running") and s["waiting"] == 0)


async def test_a_waiting_prefill_leaves_the_queue(tmp_path: Path) -> None:
    async with running_pod("prefill", tmp_path, engine=slow_engine()) as pod:
        async with leaving(pod, prefill_leg(LONG, vllm_xargs=SOON)):
            await until_state(pod, "running", lambda s: s.get("running"))
            async with leaving(pod, prefill_leg("x" + LONG, vllm_xargs=LATE)):
                await until_state(pod, "waiting", lambda s: s["waiting"] == 1)
                assert await pod.metric("flowprefill_queue_requests", slo_class="document") == 1
            await until_state(pod, "queue empty", lambda s: s["waiting"] == 0)
            assert await pod.metric("flowprefill_queue_requests", slo_class="document") == 0
        await all_free(pod)


async def test_a_suspended_prefill_is_unwound_while_another_runs(tmp_path: Path) -> None:
    async with running_pod("prefill", tmp_path, engine=slow_engine()) as pod:
        async with leaving(pod, prefill_leg(LONG, vllm_xargs=LATE)):
            await until_state(pod, "running", lambda s: s.get("running"))
            urgent = asyncio.ensure_future(
                pod.api.post("/v1/completions", json=prefill_leg("urgent " * 40, vllm_xargs=SOON))
            )
            await until_state(pod, "suspended", lambda s: len(s["suspended"]) == 1)
        await until_state(pod, "nothing suspended", lambda s: not s["suspended"] and s.get("running"))
        assert not urgent.done()
        assert await pod.metric("flowprefill_prefill_preemptions_total") == 1
        urgent.cancel()
        await asyncio.gather(urgent, return_exceptions=True)
        await all_free(pod)


async def test_kv_of_a_finished_prefill_goes_when_it_is_released_over_http(tmp_path: Path) -> None:
    async with running_pod("prefill", tmp_path) as pod:
        params = await prefilled(pod, LONG)
        assert await pod.metric("flowprefill_kv_blocks_free") < 512
        answer = await pod.api.delete(f"/v1/kv/{params['remote_request_id']}")
        assert answer.status_code == 204
        await all_free(pod)
        assert await pod.metric("flowprefill_kv_transfer_holds_total", end="aborted") == 1
        assert (await pod.api.delete("/v1/kv/nobody")).status_code == 204


async def test_kv_that_nobody_pulls_goes_when_its_lease_ends(tmp_path: Path) -> None:
    config = pod_config(kvTransfer={"leaseSeconds": 1, "timeoutSeconds": 1})
    async with running_pod("prefill", tmp_path, config=config) as pod:
        params = await prefilled(pod, LONG)
        await pod.until_metric("flowprefill_kv_transfer_holds_total", 1, end="expired")
        await all_free(pod)
        async with running_pod("decode", tmp_path, config=config) as decode:
            answer = await decode.api.post("/v1/completions", json=decode_leg(LONG, params))
            assert answer.status_code == 502
            assert answer.json()["error"]["code"] == "kv_transfer_failed"
            assert "lease" in answer.json()["error"]["message"]
            assert await decode.metric("flowprefill_kv_transfer_received_tokens_total") == 0
            await all_free(decode)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_a_running_answer_ends_it(tmp_path: Path, stream: bool) -> None:
    decode = slow_engine(20.0)  # 40 ms a step: 4000 tokens would take minutes
    async with running_pair(tmp_path, decode=decode) as (p, d):
        params = await prefilled(p, "hello there")
        leg = decode_leg("hello there", params, max_tokens=4000, stream=stream, n=2)
        async with httpx.AsyncClient(base_url=d.api.base_url, timeout=60) as client:
            if stream:
                async with client.stream("POST", "/v1/completions", json=leg) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: "):
                            break
            else:
                request = asyncio.ensure_future(client.post("/v1/completions", json=leg))
                await d.until_metric("flowprefill_decode_sequences", 2, state="active")
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)
        await d.until_metric("flowprefill_decode_sequences", 0)
        await all_free(d)
        assert await d.metric("flowprefill_decode_steps_total") < 1000


async def test_a_client_that_leaves_while_its_kv_is_pulled_frees_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    entered, leave = threading.Event(), threading.Event()
    decode = simulated_engine()
    write = decode.write_blocks

    def slow_write(block_ids: Any, data: memoryview) -> None:
        entered.set()
        leave.wait(30)
        write(block_ids, data)

    monkeypatch.setattr(decode, "write_blocks", slow_write)
    async with running_pair(tmp_path, decode=decode) as (p, d):
        params = await prefilled(p, LONG)
        async with leaving(d, decode_leg(LONG, params)):
            await until(entered.is_set)
        # The thread still writes: the blocks must not be free yet.
        await d.until_metric("flowprefill_decode_sequences", 1, state="filling")
        assert await d.metric("flowprefill_kv_blocks_free") < 512
        leave.set()
        await all_free(d)
        await p.until_metric("flowprefill_kv_transfer_holds_total", 1, end="aborted")
        await all_free(p)


async def test_a_decode_leg_that_is_refused_frees_the_prefill_pod(tmp_path: Path) -> None:
    async with running_pair(tmp_path) as (p, d):
        params = await prefilled(p, "hello")
        answer = await d.api.post("/v1/completions", json=decode_leg("hello", params, max_tokens=4096))
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        await p.until_metric("flowprefill_kv_transfer_holds_total", 1, end="aborted")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_colocated_pod_frees_everything_at_every_stage(tmp_path: Path, stream: bool) -> None:
    config = pod_config(mode="Colocated")
    async with running_pod("colocated", tmp_path, engine=slow_engine(50.0), config=config) as pod:
        body = {"model": MODEL, "prompt": LONG, "max_tokens": 400, "temperature": 0, "stream": stream}
        async with leaving(pod, body):
            await until_state(pod, "prefill runs", lambda s: s.get("running"))
        await all_free(pod)
        body["prompt"] = "short"
        async with httpx.AsyncClient(base_url=pod.api.base_url, timeout=60) as client:
            if stream:
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: "):
                            break
            else:
                request = asyncio.ensure_future(client.post("/v1/completions", json=body))
                await pod.until_metric("flowprefill_decode_sequences", 1, state="active")
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)
        await pod.until_metric("flowprefill_decode_sequences", 0)
        await all_free(pod)


async def test_the_pods_still_serve_after_all_of_this(tmp_path: Path) -> None:
    async with running_pair(tmp_path) as (p, d):
        for _ in range(5):
            async with httpx.AsyncClient(base_url=p.api.base_url) as client:
                request = asyncio.ensure_future(client.post("/v1/completions", json=prefill_leg(LONG)))
                await asyncio.sleep(0)
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)
        params = await prefilled(p, "hello")
        answer = await d.api.post("/v1/completions", json=decode_leg("hello", params, stream=True))
        assert stream_events(answer.text)
        await p.until_metric("flowprefill_kv_transfer_held_requests", 0)
        await all_free(p)
