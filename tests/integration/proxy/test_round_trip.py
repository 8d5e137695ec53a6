"""`POST /v1/round-trip`: whether one revision serves, asked by the operator on the proxy's admin port."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from flowprefill.engines.simulated.presets import preset
from flowprefill.wire import Endpoint
from support.pods import MODEL, RunningPod, running_pair, running_pod, simulated_engine
from support.pods import pod_config as real_config
from support.proxy_pods import FakeDecode, FakePrefill, serving, until
from support.proxy_under_test import Running, proxy_with_colocated, proxy_with_pods, running_proxy

OK = "flowprefill_proxy_round_trips_total{result=ok}"
FAILED = "flowprefill_proxy_round_trips_total{result=failed}"


async def ask(running: Running, revision: str = "r1") -> httpx.Response:
    return await running.http.post(f"{running.admin_url}/v1/round-trip", json={"revision": revision})


def real(pod: RunningPod, role: str) -> Endpoint:
    address, admin = (f"127.0.0.1:{port}" for port in (pod.server.api_port, pod.server.admin_port))
    return Endpoint(name=role, role=role, revision="r1", address=address, admin=admin)


async def test_a_token_that_came_through_both_legs_is_ok_and_no_clients_request(tmp_path: Path) -> None:
    async with proxy_with_pods(tmp_path) as pair:
        answer = await ask(pair.running)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert (body["revision"], body["ok"]) == ("r1", True)
        assert 0 < body["seconds"] < 30
        (first,), (second,) = pair.prefill[0].seen, pair.decode[0].seen
        assert first.body["max_tokens"] == second.body["max_tokens"] == 1
        assert 0 < first.body["vllm_xargs"]["ttft_slo"] <= 10
        assert not pair.prefill[0].held, "the KV was pulled"
        samples = await pair.running.metrics()
        assert (samples[OK], samples[FAILED]) == (1, 0)
        counted = ("flowprefill_request", "flowprefill_ttft", "flowprefill_proxy_dispatch")
        grown = [name for name, value in samples.items() if name.startswith(counted) and value]
        assert [name for name in grown if "_created{" not in name] == []
        report = await pair.running.attainment()
        assert {(c["met"], c["missed"]) for c in report["classes"].values()} == {(0, 0)}


async def test_it_goes_to_the_revision_that_was_named_though_another_is_newer(tmp_path: Path) -> None:
    pods = {}
    async with AsyncExitStack() as stack:
        for revision, created_s in (("r1", 1.0), ("r2", 2.0)):
            p = FakePrefill(name=f"p-{revision}", revision=revision)
            d = FakeDecode(name=f"d-{revision}", revision=revision, sources=[p])
            for each in (p, d):
                each.address = await stack.enter_async_context(serving(each.app()))
                pods[each.name] = (each, each.endpoint(created_s=created_s))
        running = await stack.enter_async_context(running_proxy(tmp_path, [e for _, e in pods.values()]))
        await until(lambda: len(running.proxy.pods.revisions) == 2)
        assert (await ask(running, "r1")).status_code == 200
        assert {name: len(each.seen) for name, (each, _) in pods.items()} == {
            "p-r1": 1,
            "d-r1": 1,
            "p-r2": 0,
            "d-r2": 0,
        }


async def test_a_revision_that_is_unknown_or_has_no_ready_pair_is_a_503_that_says_so(tmp_path: Path) -> None:
    async with proxy_with_pods(tmp_path) as pair:
        answer = await ask(pair.running, "r9")
        assert answer.status_code == 503
        assert answer.json()["ok"] is False
        assert "'r9'" in answer.json()["reason"]
        assert "usable revisions: r1" in answer.json()["reason"]
        pair.running.write_endpoints([pair.prefill[0].endpoint(), pair.decode[0].endpoint(ready=False)])
        await until(lambda: not pair.running.proxy.pods.revisions)
        assert (await ask(pair.running)).status_code == 503
        assert not pair.prefill[0].seen


async def test_a_leg_that_fails_is_a_503_with_the_pod_and_what_it_said(tmp_path: Path) -> None:
    async with proxy_with_pods(tmp_path) as pair:
        pair.prefill[0].fail[1] = lambda: Response("out of memory", status_code=500)
        answer = await ask(pair.running)
        assert answer.status_code == 503
        assert "p0 answered 500: out of memory" in answer.json()["reason"]
        pair.decode[0].fail[1] = lambda: Response("no such model", status_code=404)
        answer = await ask(pair.running)
        assert "d0 answered 404 to decode: no such model" in answer.json()["reason"]
        await until(lambda: pair.prefill[0].released, "KV that nobody pulls is given back")
        assert (await pair.running.metrics())[FAILED] == 2


async def test_a_pod_that_never_answers_is_given_up_after_the_limit(tmp_path: Path) -> None:
    async with proxy_with_pods(tmp_path, round_trip_s=0.3) as pair:
        pair.prefill[0].gate.clear()
        answer = await ask(pair.running)
        assert answer.status_code == 503
        assert answer.json()["reason"] == "no answer within 0.3 s: it was still in prefill on p0"
        await until(lambda: pair.prefill[0].seen[0].cancelled)


async def test_one_runs_at_a_time_and_whoever_leaves_makes_room(tmp_path: Path) -> None:
    async with proxy_with_pods(tmp_path) as pair:
        pair.prefill[0].gate.clear()
        first = asyncio.create_task(ask(pair.running))
        await until(lambda: pair.prefill[0].seen)
        second = await ask(pair.running)
        assert second.status_code == 429
        assert second.headers["retry-after"] == "1"
        assert second.json() == {
            "revision": "r1",
            "ok": False,
            "reason": "another round trip is under way",
        }
        first.cancel()
        await until(lambda: pair.prefill[0].seen[0].cancelled)
        pair.prefill[0].gate.set()
        assert (await ask(pair.running)).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"{}", b'{"revision": 3}', b'{"revision": ""}', b"x" * 5000])
async def test_a_body_without_a_revision_is_refused(tmp_path: Path, body: bytes) -> None:
    async with running_proxy(tmp_path) as running:
        answer = await running.http.post(f"{running.admin_url}/v1/round-trip", content=body)
        assert answer.status_code in (400, 413)
        assert answer.json()["error"]["message"]


async def test_requests_that_wait_at_the_proxy_do_not_hold_it_up(tmp_path: Path) -> None:
    async with proxy_with_pods(tmp_path) as pair:
        pair.prefill[0].gate.clear()
        window = "word " * 2500
        waiting = [asyncio.create_task(pair.running.complete(window, max_tokens=1)) for _ in range(5)]
        await until(lambda: pair.running.proxy.dispatcher.num_waiting >= 3)
        busy = len(pair.prefill[0].seen)
        trip = asyncio.create_task(ask(pair.running))
        await until(lambda: len(pair.prefill[0].seen) == busy + 1, "it reached the pod at once")
        pair.prefill[0].gate.set()
        assert (await trip).status_code == 200
        await asyncio.gather(*waiting)


async def test_colocated_pods_are_asked_with_a_key_that_they_accept(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# comment\nsecret-1\nsecret-2\n")
    async with proxy_with_colocated(tmp_path, keys=keys) as (running, pod):
        assert (await ask(running)).status_code == 200
        assert pod.seen[0].headers["authorization"] == "Bearer secret-1"
        keys.write_text("secret-3\n")
        assert (await ask(running)).status_code == 200
        assert pod.seen[1].headers["authorization"] == "Bearer secret-3"


MODEL_CONFIG: dict[str, Any] = {"model": {"uri": "simulated://tiny", "servedName": MODEL}}


async def test_with_real_pods_the_decode_pod_computes_a_token_from_kv_that_it_pulled(tmp_path: Path) -> None:
    async with running_pair(tmp_path) as (prefill, decode):
        endpoints = [real(prefill, "prefill"), real(decode, "decode")]
        async with running_proxy(tmp_path, endpoints, config=MODEL_CONFIG) as running:
            await until(lambda: running.proxy.pods.candidates())
            answer = await ask(running)
            assert answer.status_code == 200, answer.text
        assert await decode.metric("flowprefill_kv_transfer_received_tokens_total") == len("Hello")
        assert await decode.metric("flowprefill_decode_steps_total") == 1
        assert await prefill.metric("flowprefill_kv_transfer_held_requests") == 0


async def test_a_revision_that_serves_under_another_name_is_asked_by_that_name(tmp_path: Path) -> None:
    """A rollout may change the name; the proxies that are asked first are still those of the old revision."""
    async with running_pair(tmp_path) as (prefill, decode):
        endpoints = [real(prefill, "prefill"), real(decode, "decode")]
        renamed = {"model": {"uri": "simulated://tiny", "servedName": "the-old-name"}, "revision": "r0"}
        async with running_proxy(tmp_path, endpoints, config=renamed) as running:
            await until(lambda: running.proxy.pods.candidates())
            answer = await ask(running)
            assert answer.status_code == 200, answer.text


async def test_with_a_real_colocated_pod_and_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-1\n")
    config = real_config(mode="Colocated", apiKeysFile=str(keys))
    async with running_pod("colocated", tmp_path, config=config) as pod:
        options: dict[str, Any] = {"config": MODEL_CONFIG | {"mode": "Colocated"}}
        async with running_proxy(tmp_path, [real(pod, "colocated")], keys=keys, **options) as running:
            await until(lambda: running.proxy.pods.candidates())
            assert (await ask(running)).status_code == 200
        async with running_proxy(tmp_path, [real(pod, "colocated")], **options) as running:
            await until(lambda: running.proxy.pods.candidates())
            answer = await ask(running)
            assert answer.status_code == 503
            assert "answered 401" in answer.json()["reason"]


async def test_a_long_prefill_on_the_only_pod_is_interrupted_for_it(tmp_path: Path) -> None:
    slow = simulated_engine(cost=preset("tiny").scaled(15.0))
    async with running_pair(tmp_path, prefill=slow) as (prefill, decode):
        endpoints = [real(prefill, "prefill"), real(decode, "decode")]
        async with running_proxy(tmp_path, endpoints, config=MODEL_CONFIG) as running:
            await until(lambda: any(p.state for p in running.proxy.pods.candidates()))
            body = {"model": MODEL, "prompt": "x" * 4000, "max_tokens": 1}
            headers = {"x-flowprefill-slo-class": "batch"}
            patient = asyncio.create_task(running.post("/v1/completions", body, headers=headers))
            await until(lambda: any(p.state and p.state.running for p in running.proxy.pods.candidates()))
            answer = await ask(running)
            assert answer.status_code == 200, answer.text
            assert not patient.done()
            assert (await patient).status_code == 200
        assert await prefill.metric("flowprefill_prefill_preemptions_total") >= 1
