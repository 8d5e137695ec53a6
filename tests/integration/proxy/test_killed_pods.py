"""Pods that are killed with SIGKILL in the middle of a request: real processes, the simulated engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from flowprefill.wire import Endpoint
from support.pod_process import PodProcess, pod_process
from support.pods import MODEL
from support.proxy_pods import until
from support.proxy_under_test import Running, running_proxy

SLOW = {"type": "simulated", "args": ["--cost", "tiny", "--scale", "10"]}
LONG = {"model": MODEL, "prompt": "x" * 3000, "max_tokens": 4, "ignore_eos": True}
CONFIG = {"model": {"uri": "simulated://tiny", "servedName": MODEL}}
RETRIES = "flowprefill_proxy_leg_retries_total{leg=prefill}"


def endpoint(name: str, role: str, pod: PodProcess, **fields: Any) -> Endpoint:
    api, admin, _ = pod.ports
    fields = {"address": f"127.0.0.1:{api}", "admin": f"127.0.0.1:{admin}"} | fields
    return Endpoint(name=name, role=role, revision="r1", **fields)


@asynccontextmanager
async def service(
    tmp_path: Path, *, num_prefill: int, **settings: Any
) -> AsyncIterator[tuple[Running, dict[str, PodProcess], list[Endpoint]]]:
    """A proxy in front of prefill pods `p0`, ... and the decode pod `d0`."""
    async with AsyncExitStack() as stack:
        pods = {}
        for name in (*(f"p{i}" for i in range(num_prefill)), "d0"):
            role = "prefill" if name.startswith("p") else "decode"
            pods[name] = await stack.enter_async_context(pod_process(tmp_path / name, role, engine=SLOW))
        endpoints = [
            endpoint(name, "prefill" if name.startswith("p") else "decode", pod) for name, pod in pods.items()
        ]
        running = await stack.enter_async_context(
            running_proxy(tmp_path, endpoints, config=CONFIG, **settings)
        )
        await until(lambda: all(p.state for p in running.proxy.pods.candidates()), "state streams")
        yield running, pods, endpoints


async def prefilling(running: Running, **fields: Any) -> tuple[asyncio.Task[httpx.Response], str]:
    """A request that is being prefilled, and the pod that does it."""
    request = asyncio.create_task(running.post("/v1/completions", LONG | fields))
    table = running.proxy.pods
    await until(lambda: any(p.state and p.state.running for p in table.candidates()), "it runs")
    return request, next(p.name for p in table.candidates() if p.state and p.state.running)


async def test_a_request_on_a_prefill_pod_that_is_killed_is_answered_by_another(tmp_path: Path) -> None:
    async with service(tmp_path, num_prefill=2) as (running, pods, _):
        request, name = await prefilling(running)
        await pods[name].kill()
        answer = await request
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert (await running.metrics())[RETRIES] == 1
        # The dead pod stays listed, as while an API server is away, and costs no further request.
        answers = await asyncio.gather(*(running.post("/v1/completions", LONG) for _ in range(4)))
        assert {answer.status_code for answer in answers} == {200}
        assert (await running.metrics())[RETRIES] == 1


async def test_a_stream_without_a_token_yet_is_answered_by_another_pod_too(tmp_path: Path) -> None:
    async with service(tmp_path, num_prefill=2) as (running, pods, _):
        request, name = await prefilling(running, stream=True)
        await pods[name].kill()
        answer = await request
        assert answer.status_code == 200, answer.text
        *events, done, _ = answer.text.split("\n\n")
        assert done == "data: [DONE]"
        assert len([event for event in events if '"text":""' not in event]) == 4


async def test_without_another_pod_it_is_a_503_that_says_when_to_try_again(tmp_path: Path) -> None:
    async with service(tmp_path, num_prefill=1) as (running, pods, _):
        request, name = await prefilling(running)
        await pods[name].kill()
        answer = await request
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["retry-after"]) >= 1
        await running.at_rest()


async def test_a_pod_that_is_killed_and_started_again_answers_the_request_it_died_under(
    tmp_path: Path,
) -> None:
    """Nobody tells the proxy, as while an API server is away."""
    async with service(tmp_path, num_prefill=1, pod_wait_s=60.0) as (running, pods, _):
        request, name = await prefilling(running)
        ports = pods[name].ports
        await pods[name].kill()
        async with pod_process(tmp_path / name, "prefill", engine=SLOW, ports=ports):
            answer = await request
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4


async def test_a_pod_that_comes_back_while_a_request_waits_for_it_answers_it(tmp_path: Path) -> None:
    async with service(tmp_path, num_prefill=1, pod_wait_s=60.0) as (running, pods, endpoints):
        _, ports = await pods["p0"].kill(), pods["p0"].ports
        away = [e.model_copy(update={"ready": e.role != "prefill"}) for e in endpoints]
        running.write_endpoints(away)
        await until(lambda: not running.proxy.pods.candidates())
        request = asyncio.create_task(running.post("/v1/completions", LONG))
        await until(lambda: running.proxy.dispatcher.num_waiting == 1)
        async with pod_process(tmp_path / "p0", "prefill", engine=SLOW, ports=ports):
            running.write_endpoints(endpoints)
            answer = await request
        assert answer.status_code == 200, answer.text


async def test_a_decode_pod_that_is_killed_before_its_first_byte_costs_a_fresh_prefill_at_most(
    tmp_path: Path,
) -> None:
    async with (
        service(tmp_path, num_prefill=1) as (running, pods, endpoints),
        pod_process(tmp_path / "d1", "decode", engine=SLOW) as other,
    ):
        running.write_endpoints([*endpoints, endpoint("d1", "decode", other)])
        table = running.proxy.pods
        await until(lambda: table.num_endpoints()["decode"] == 2)
        request, _ = await prefilling(running)
        chosen = next(name for (role, name), n in table.outstanding().items() if role == "decode" and n)
        await (other if chosen == "d1" else pods["d0"]).kill()
        answer = await request
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
