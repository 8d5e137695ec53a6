"""What the servers say to odd requests, over real sockets. The process must live on after each of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from flowprefill.engines.simulated.presets import preset
from support.pods import (
    MODEL,
    RunningPod,
    WordTokenizer,
    decode_leg,
    expected_text,
    live_config,
    pod_config,
    prefill_leg,
    prefilled,
    running_pair,
    running_pod,
    simulated_engine,
)

ROLES = ("prefill", "decode", "colocated")


@pytest.fixture(params=ROLES)
async def pod(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RunningPod]:
    async with running_pod(request.param, tmp_path) as running:
        yield running


def assert_envelope(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_bodies_that_broke_others_are_400_and_the_pod_lives(pod: RunningPod) -> None:
    bodies = [
        b"\xff",
        b"[]",
        b"[" * 2000 + b"]" * 2000,
        b"",
        b'{"model":1}',
        b'{"prompt":null}',
        b'{"model":"test-model","messages":[{"role":"user","content":"\\ud800"}]}',
    ]
    for path in ("/v1/completions", "/v1/chat/completions"):
        for body in bodies:
            assert_envelope(await pod.api.post(path, content=body), 400)
    assert (await pod.admin.get("/health")).status_code == 200
    assert await pod.metric("flowprefill_pod_requests_total", code="400") == 2 * len(bodies)
    assert await pod.metric("flowprefill_scheduler_rounds_total", event="arrival") == 0


async def test_a_large_body_is_413(tmp_path: Path) -> None:
    config = pod_config(proxy={"maxBodyBytes": 1000})
    async with running_pod("colocated", tmp_path, config=config) as pod:
        error = assert_envelope(await pod.api.post("/v1/completions", content=b"x" * 1001), 413)
        assert "1000" in error["message"]

        async def chunked() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b"x" * 100

        assert_envelope(await pod.api.post("/v1/completions", content=chunked()), 413)
        assert (await pod.admin.get("/health")).status_code == 200


async def test_unknown_paths_methods_and_forms(pod: RunningPod) -> None:
    for path in ("/v1/embeddings", "/", "/v1", "/invocations", "/v1/completions/x", "/health", "/metrics"):
        assert_envelope(await pod.api.post(path, json={}), 404)
    answer = await pod.api.get("/v1/completions")
    assert_envelope(answer, 405)
    assert answer.headers["allow"] == "POST"
    assert_envelope(await pod.api.post("/v1/completions", files={"file": b"x"}), 400)
    assert_envelope(await pod.api.post("/v1/completions", data={"model": "x"}), 400)
    assert (await pod.api.get("/v1/models?limit=3")).status_code == 200


async def test_models_lists_what_is_served(pod: RunningPod) -> None:
    listed = (await pod.api.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == [MODEL]
    one = (await pod.api.get(f"/v1/models/{MODEL}")).json()
    assert one == listed["data"][0]
    assert_envelope(await pod.api.get("/v1/models/other"), 404)


async def test_another_model_is_404(pod: RunningPod) -> None:
    leg = prefill_leg("x", model="gpt-4")
    error = assert_envelope(await pod.api.post("/v1/completions", json=leg), 404)
    assert error["code"] == "model_not_found"
    assert MODEL in error["message"]


async def test_request_ids_are_echoed_when_harmless(pod: RunningPod) -> None:
    answer = await pod.api.get("/v1/models", headers={"x-request-id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"
    for odd in ("a b", "x" * 200, ""):
        answer = await pod.api.get("/v1/models", headers={"x-request-id": odd})
        assert answer.headers["x-request-id"] not in (odd, "abc-1")
    answer = await pod.api.post("/v1/completions", content=b"[]", headers={"x-request-id": "abc-2"})
    assert answer.headers["x-request-id"] == "abc-2"
    assert "server" not in answer.headers


@pytest.mark.parametrize("field", [{"echo": True}, {"logprobs": 5}, {"prompt_logprobs": 1}, {"tools": [1]}])
async def test_what_prefill_and_decode_cannot_carry_is_400(pod: RunningPod, field: dict[str, Any]) -> None:
    error = assert_envelope(await pod.api.post("/v1/completions", json=prefill_leg("x", **field)), 400)
    assert error["param"] == next(iter(field))


async def test_a_prefill_pod_takes_only_prefill_legs(tmp_path: Path) -> None:
    async with running_pod("prefill", tmp_path) as pod:
        for changes in (
            {"kv_transfer_params": None},
            {"kv_transfer_params": {}},
            {"kv_transfer_params": {"do_remote_prefill": True}},
            {"max_tokens": 5},
            {"stream": True},
            {"n": 2},
            {"prompt": ["one", "two"]},
            {"min_tokens": 10},
        ):
            assert_envelope(await pod.api.post("/v1/completions", json=prefill_leg("x") | changes), 400)
        assert await pod.metric("flowprefill_scheduler_rounds_total", event="arrival") == 0
        await prefilled(pod, "x", min_tokens=1)


async def test_a_decode_pod_never_computes_a_prompt_by_itself(tmp_path: Path) -> None:
    async with running_pod("decode", tmp_path) as pod:
        for params in (None, {}, {"do_remote_decode": True}, {"do_remote_prefill": True}):
            leg = decode_leg("hello", {}, kv_transfer_params=params)
            error = assert_envelope(await pod.api.post("/v1/completions", json=leg), 400)
            assert error["param"] == "kv_transfer_params"
        assert await pod.metric("flowprefill_decode_steps_total") == 0


async def test_token_ids_are_served_and_their_number_is_exact(tmp_path: Path) -> None:
    model = simulated_engine()
    token_ids = WordTokenizer().encode("Some words as ids")
    async with running_pair(tmp_path, prefill=model) as (p, d):
        for prompt in (token_ids, [token_ids]):
            params = await prefilled(p, prompt)
            assert params["num_tokens"] == len(token_ids)
            body = (await d.api.post("/v1/completions", json=decode_leg(prompt, params))).json()
            assert body["choices"][0]["text"] == expected_text(model, "Some words as ids", 12)
        too_high = await p.api.post("/v1/completions", json=prefill_leg([1, 2, 1000]))
        assert_envelope(too_high, 400)


async def test_a_prompt_that_is_too_long_is_refused_before_any_prefill(tmp_path: Path) -> None:
    async with running_pod("prefill", tmp_path) as pod:
        longest = [1] * 4095
        cases: list[tuple[list[int], int | None]] = [([1] * 4096, None), ([1] * 5000, None), (longest, 2)]
        for prompt, limit in cases:
            xargs = {} if limit is None else {"decode_max_tokens": limit}
            leg = prefill_leg(prompt, vllm_xargs=xargs)
            error = assert_envelope(await pod.api.post("/v1/completions", json=leg), 400)
            assert error["code"] == "context_length_exceeded"
            assert "4096" in error["message"]
        assert await pod.metric("flowprefill_scheduler_rounds_total", event="arrival") == 0
        await prefilled(pod, longest, vllm_xargs={"decode_max_tokens": 1})


async def test_kv_of_another_revision_is_refused_and_nothing_is_recomputed(tmp_path: Path) -> None:
    other = simulated_engine(revision="1")
    async with running_pair(tmp_path, decode=other) as (p, d):
        params = await prefilled(p, "hello")
        for stream in (False, True):
            leg = decode_leg("hello", params, stream=stream)
            error = assert_envelope(await d.api.post("/v1/completions", json=leg), 502)
            assert error["code"] == "kv_transfer_failed"
            assert "revision" in error["message"]
        assert await d.metric("flowprefill_decode_steps_total") == 0
        assert await d.metric("flowprefill_kv_transfer_failures_total", reason="layout_mismatch") == 2


async def test_another_prompt_than_the_prefilled_one_is_refused(tmp_path: Path) -> None:
    async with running_pair(tmp_path) as (p, d):
        params = await prefilled(p, "hello")
        error = assert_envelope(await d.api.post("/v1/completions", json=decode_leg("hell", params)), 502)
        assert "5 tokens" in error["message"]
        assert "4 here" in error["message"]


async def test_a_lost_prefill_pod_is_an_error_also_of_a_stream(tmp_path: Path) -> None:
    async with running_pod("decode", tmp_path) as d:
        async with running_pod("prefill", tmp_path) as p:
            params = await prefilled(p, "hello")
        leg = decode_leg("hello", params, stream=True)
        answer = await d.api.post("/v1/completions", json=leg)
        error = assert_envelope(answer, 502)  # not text/event-stream: the stream never began
        assert error["code"] == "kv_transfer_failed"
        assert await d.metric("flowprefill_decode_steps_total") == 0


async def test_an_engine_failure_ends_its_request_and_the_pod_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = simulated_engine()
    run = engine.run
    broken = True

    def fails(plan: Any, gate: Any) -> Any:
        if broken:
            raise RuntimeError("the device fell off")
        return run(plan, gate)

    monkeypatch.setattr(engine, "run", fails)
    async with running_pod("prefill", tmp_path, engine=engine) as pod:
        error = assert_envelope(await pod.api.post("/v1/completions", json=prefill_leg("hello")), 500)
        assert error["code"] == "engine_failed"
        broken = False
        await prefilled(pod, "hello")


@pytest.mark.parametrize("role", ["prefill", "colocated"])
async def test_a_crashed_scheduler_makes_the_pod_unhealthy_and_hangs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    async with running_pod(role, tmp_path) as pod:
        assert (await pod.admin.get("/health")).status_code == 200

        def broken(*args: object) -> object:
            raise RuntimeError("a bug")

        monkeypatch.setattr("flowprefill.scheduling.scheduler.Scheduler.handle", broken)
        leg = prefill_leg("hello") if role == "prefill" else {"model": MODEL, "prompt": "hello"}
        assert_envelope(await pod.api.post("/v1/completions", json=leg), 500)
        assert_envelope(await pod.api.post("/v1/completions", json=leg), 503)
        for path in ("/health", "/ready"):
            answer = await pod.admin.get(path)
            assert answer.status_code == 503
        assert "a bug" in (await pod.admin.get("/health")).json()["reason"]


async def test_a_crashed_decode_thread_makes_the_pod_unhealthy_and_hangs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> object:
        raise RuntimeError("a bug")

    async with running_pair(tmp_path) as (p, d):
        params = await prefilled(p, "hello")
        monkeypatch.setattr("flowprefill.execution.decode_batch.DecodeBatch.filled", broken)
        monkeypatch.setattr("flowprefill.execution.decode_batch.DecodeBatch.admit", broken)
        assert_envelope(await d.api.post("/v1/completions", json=decode_leg("hello", params)), 500)
        for path in ("/health", "/ready"):
            assert (await d.admin.get(path)).status_code == 503
        assert await d.metric("flowprefill_pod_ready") == 0
        await p.until_metric("flowprefill_kv_transfer_holds_total", 1, end="aborted")


async def test_a_class_that_wants_to_be_told_at_once_is_shed(tmp_path: Path) -> None:
    live = live_config()
    shedding = live.model_copy(
        update={
            "slo_classes": tuple(
                c.model_copy(update={"shed_when_infeasible": True}) for c in live.slo_classes
            )
        }
    )
    async with running_pod("prefill", tmp_path, live=shedding) as pod:
        late = {"ttft_slo": 0.0001, "ttft_target": 0.5, "slo_class": "chat"}
        answer = await pod.api.post("/v1/completions", json=prefill_leg("x" * 500, vllm_xargs=late))
        assert assert_envelope(answer, 429)["code"] == "shed"
        await prefilled(pod, "x" * 500)


async def test_a_full_queue_is_429_with_retry_after(tmp_path: Path) -> None:
    slow = simulated_engine(cost=preset("tiny").scaled(300.0))
    async with running_pod("prefill", tmp_path, engine=slow, live=live_config(queueLimit=1)) as pod:
        body = prefill_leg("x" * 2000)
        running = asyncio.ensure_future(pod.api.post("/v1/completions", json=body))
        await pod.until_metric("flowprefill_queue_slack_seconds_count", 1)  # it has left the queue
        waiting = asyncio.ensure_future(pod.api.post("/v1/completions", json=body))
        await pod.until_metric("flowprefill_queue_requests", 1)
        answer = await pod.api.post("/v1/completions", json=body)
        assert assert_envelope(answer, 429)["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
        running.cancel()
        waiting.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)


async def test_a_colocated_pod_answers_plain_requests_and_many_prompts(tmp_path: Path) -> None:
    model = simulated_engine()
    config = pod_config(mode="Colocated")
    async with running_pod("colocated", tmp_path, engine=model, config=config) as pod:
        prompts = ["first prompt here", "a second one"]
        body = {"model": MODEL, "prompt": prompts, "max_tokens": 6, "temperature": 0, "n": 2}
        answer = (await pod.api.post("/v1/completions", json=body)).json()
        expected = [expected_text(model, prompt, 6) for prompt in prompts for _ in range(2)]
        assert [c["text"] for c in answer["choices"]] == expected
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
        too_many = await pod.api.post("/v1/completions", json=body | {"n": 9})
        assert_envelope(too_many, 400)
        with_kv = await pod.api.post("/v1/completions", json=body | {"kv_transfer_params": {"a": 1}})
        assert_envelope(with_kv, 400)
        await pod.until_metric("flowprefill_kv_blocks_free", model.spec.num_kv_blocks)


async def test_a_prompt_longer_than_a_colocated_pods_share_of_kv_is_400(tmp_path: Path) -> None:
    engine = simulated_engine(num_kv_blocks=64, max_model_len=1024)
    async with running_pod("colocated", tmp_path, engine=engine) as pod:
        body = {"model": MODEL, "prompt": [1] * 600, "max_tokens": 2}
        error = assert_envelope(await pod.api.post("/v1/completions", json=body), 400)
        assert error["code"] == "context_length_exceeded"
        assert (await pod.api.get("/v1/models")).json()["data"][0]["max_model_len"] == 512


async def test_api_keys_protect_every_path_of_a_colocated_api_port(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("team-key\n")
    async with running_pod("colocated", tmp_path, config=pod_config(apiKeysFile=str(keys))) as pod:
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/nope")):
            assert_envelope(await pod.api.request(method, path), 401)
        ok = await pod.api.get("/v1/models", headers={"authorization": "Bearer team-key"})
        assert ok.status_code == 200
        assert (await pod.admin.get("/ready")).status_code == 200


async def test_metrics_come_in_the_asked_format(pod: RunningPod) -> None:
    plain = await pod.admin.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    openmetrics = await pod.admin.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert openmetrics.text.rstrip().endswith("# EOF")


async def test_history_tells_the_last_tasks(tmp_path: Path) -> None:
    async with running_pod("prefill", tmp_path) as pod:
        await prefilled(pod, "hello there")
        (task,) = (await pod.admin.get("/v1/history")).json()["tasks"]
        assert task["items"][0][1:] == [len("hello there"), 0]
        assert json.dumps(task)
