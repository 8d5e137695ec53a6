"""What the proxy relies on in pods: the stand-ins of its own tests and the real servers pass the same suite."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest

from flowprefill.wire import KV_RELEASE_PATH, Endpoint, PodState
from support.pods import MODEL, pod_config, running_pair, running_pod
from support.proxy_pods import FakeColocated, FakeDecode, FakePrefill, serving, until
from support.proxy_under_test import running_proxy


@dataclass
class Pods:
    """A pair of pods that serve `MODEL`."""

    prefill: Endpoint
    decode: Endpoint


def _endpoint(name: str, role: str, server: object) -> Endpoint:
    return Endpoint(
        name=name,
        role=role,
        revision="r1",
        address=f"127.0.0.1:{server.api_port}",
        admin=f"127.0.0.1:{server.admin_port}",
    )


@asynccontextmanager
async def pair(kind: str, tmp_path) -> AsyncIterator[Pods]:
    async with AsyncExitStack() as stack:
        if kind == "real":
            p, d = await stack.enter_async_context(running_pair(tmp_path))
            yield Pods(_endpoint("p0", "prefill", p.server), _endpoint("d0", "decode", d.server))
            return
        prefill = FakePrefill(name="p0")
        decode = FakeDecode(name="d0", sources=[prefill])
        for pod in (prefill, decode):
            pod.address = await stack.enter_async_context(serving(pod.app()))
            pod.report()
        yield Pods(prefill.endpoint(), decode.endpoint())


@asynccontextmanager
async def colocated(kind: str, tmp_path) -> AsyncIterator[Endpoint]:
    if kind == "real":
        config = pod_config(mode="Colocated")
        async with running_pod("colocated", tmp_path, config=config) as pod:
            yield _endpoint("c0", "colocated", pod.server)
        return
    fake = FakeColocated(name="c0")
    async with serving(fake.app()) as fake.address:
        fake.report()
        yield fake.endpoint()


@pytest.fixture(params=["stand-in", "real"])
def kind(request) -> str:
    return request.param


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        yield client


def prefill_leg(**changes: object) -> dict:
    return {
        "model": MODEL,
        "prompt": "a b c d",
        "stream": False,
        "n": 1,
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True},
        "vllm_xargs": {"ttft_slo": 0.4, "ttft_target": 0.5, "slo_class": "chat"},
        **changes,
    }


def decode_leg(kv_params: dict, **changes: object) -> dict:
    return {
        "model": MODEL,
        "prompt": "a b c d",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 3,
        "ignore_eos": True,
        "kv_transfer_params": kv_params,
        "vllm_xargs": {"slo_class": "chat"},
        **changes,
    }


async def prefill(http: httpx.AsyncClient, pods: Pods, request_id: str = "r-1", **changes: object):
    return await http.post(
        f"http://{pods.prefill.address}/v1/completions",
        json=prefill_leg(**changes),
        headers={"x-request-id": request_id},
    )


async def decode(http: httpx.AsyncClient, pods: Pods, kv_params: dict, **changes: object):
    return await http.post(
        f"http://{pods.decode.address}/v1/completions",
        json=decode_leg(kv_params, **changes),
        headers={"x-request-id": "r-1"},
    )


async def test_a_prefill_leg_answers_one_token_its_usage_and_where_the_kv_waits(kind, tmp_path, http):
    async with pair(kind, tmp_path) as pods:
        answer = (await prefill(http, pods)).json()
        assert len(answer["choices"]) == 1
        assert answer["usage"]["prompt_tokens"] > 0
        params = answer["kv_transfer_params"]
        assert params["do_remote_prefill"] is True
        assert isinstance(params["remote_request_id"], str)


async def test_a_decode_leg_pulls_the_kv_and_streams_until_done(kind, tmp_path, http):
    async with pair(kind, tmp_path) as pods:
        params = (await prefill(http, pods)).json()["kv_transfer_params"]
        answer = await decode(http, pods, params, n=2)
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {0, 1}
        assert chunks[-1]["usage"]["completion_tokens"] == 6


async def test_kv_is_pulled_once_and_a_second_pull_is_an_error_not_a_recompute(kind, tmp_path, http):
    async with pair(kind, tmp_path) as pods:
        params = (await prefill(http, pods)).json()["kv_transfer_params"]
        assert (await decode(http, pods, params)).status_code == 200
        fresh = {**params, "remote_request_id": "never-seen"}
        again = await decode(http, pods, fresh, prompt="another prompt altogether")
        assert again.status_code >= 500
        assert again.json()["error"]["code"] == "kv_transfer_failed"


async def test_kv_can_be_given_back_and_is_gone_then(kind, tmp_path, http):
    async with pair(kind, tmp_path) as pods:
        params = (await prefill(http, pods)).json()["kv_transfer_params"]
        path = KV_RELEASE_PATH.format(remote_request_id=params["remote_request_id"])
        assert (await http.delete(f"http://{pods.prefill.address}{path}")).status_code == 204
        assert (await decode(http, pods, params)).status_code >= 500
        unknown = KV_RELEASE_PATH.format(remote_request_id="never-seen")
        assert (await http.delete(f"http://{pods.prefill.address}{unknown}")).status_code in (204, 404)


async def test_a_prompt_and_answer_too_long_are_refused_before_any_prefill(kind, tmp_path, http):
    async with pair(kind, tmp_path) as pods:
        xargs = {"ttft_slo": 0.4, "slo_class": "chat", "decode_max_tokens": 5000}
        answer = await prefill(http, pods, vllm_xargs=xargs)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_the_state_stream_opens_with_a_line_and_reports_every_change(kind, tmp_path, http):
    async with pair(kind, tmp_path) as pods:
        url = f"http://{pods.prefill.admin}/v1/state"
        async with http.stream("GET", url) as response:
            lines = response.aiter_lines()
            first = PodState.model_validate_json(await anext(lines))
            assert first.ready
            assert first.running is None
            second = PodState.model_validate_json(await anext(lines))  # at the latest the heartbeat
            assert second.sequence >= first.sequence


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_go_through_the_proxy_to_the_pair(kind, tmp_path, http, stream):
    async with pair(kind, tmp_path) as pods:
        directory = tmp_path / "proxy"
        directory.mkdir()
        config = {"model": {"uri": "simulated://tiny", "servedName": MODEL}}
        async with running_proxy(directory, [pods.prefill, pods.decode], config=config) as running:
            await until(lambda: any(p.state for p in running.proxy.pods.candidates()))
            body = {"model": MODEL, "prompt": ["a b c", "d e f"], "max_tokens": 4, "n": 2, "ignore_eos": True}
            if stream:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            answer = await running.post("/v1/completions", body)
            assert answer.status_code == 200, answer.text
            if stream:
                events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
                assert events[-1] == "[DONE]"
                chunks = [json.loads(event) for event in events[:-1]]
                indices = {choice["index"] for chunk in chunks for choice in chunk["choices"]}
                usage = chunks[-1]["usage"]
            else:
                indices = {choice["index"] for choice in answer.json()["choices"]}
                usage = answer.json()["usage"]
            assert indices == {0, 1, 2, 3}
            assert usage["completion_tokens"] == 16
            chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi there"}], "max_tokens": 2}
            assert (await running.post("/v1/chat/completions", chat)).status_code == 200
            await running.at_rest()
            samples = await running.metrics()
            assert samples["flowprefill_requests_total{code=200,outcome=ok,slo_class=chat}"] == 2


async def test_requests_go_through_the_proxy_to_a_colocated_pod(kind, tmp_path):
    async with colocated(kind, tmp_path) as pod:
        directory = tmp_path / "proxy"
        directory.mkdir()
        config = {"model": {"uri": "simulated://tiny", "servedName": MODEL}, "mode": "Colocated"}
        async with running_proxy(directory, [pod], config=config) as running:
            await until(lambda: any(p.state for p in running.proxy.pods.candidates()))
            answers = await asyncio.gather(
                *(
                    running.post(
                        "/v1/completions",
                        {"model": MODEL, "prompt": f"a b {i}", "max_tokens": 4, "ignore_eos": True},
                    )
                    for i in range(5)
                )
            )
            assert {answer.status_code for answer in answers} == {200}
            assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {4}
            await running.at_rest()
