"""Pods that die, clients that leave, queues that are full: what is tried again, what is told, what is freed."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.responses import JSONResponse, Response

from support.proxy_pods import serving, until
from support.proxy_under_test import proxy_with_colocated, proxy_with_pods, running_proxy

BODY = {"model": "tiny", "prompt": "a b c", "max_tokens": 3}
MISSED = "flowprefill_ttft_slo_requests_total{result=missed,slo_class=chat}"
MET = "flowprefill_ttft_slo_requests_total{result=met,slo_class=chat}"


def broken(status: int = 500):
    return lambda: Response("oops", status_code=status)


async def leave(running, body: dict, when, path: str = "/v1/completions") -> None:
    """Send a request, wait for `when`, close the connection."""
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http, asyncio.TaskGroup() as group:
        sending = group.create_task(_send(http, running.url + path, body))
        await until(when)
        sending.cancel()


async def _send(http: httpx.AsyncClient, url: str, body: dict) -> None:
    async with http.stream("POST", url, json=body) as response:
        async for _ in response.aiter_bytes():
            pass


# -- retries


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_a_prefill_leg_that_dies_is_tried_once_on_another_pod_with_what_is_left(tmp_path, status):
    async with proxy_with_pods(tmp_path, num_prefill=2) as pair:
        for pod in pair.prefill:
            pod.fail[1] = broken(status)
        pair.prefill[1].fail.clear()
        pair.prefill[0].report()
        answer = await pair.running.complete("a b c")
        assert answer.status_code == 200
        first, second = pair.prefill[0].seen[0], pair.prefill[1].seen[0]
        assert second.body["vllm_xargs"]["ttft_slo"] < first.body["vllm_xargs"]["ttft_slo"]
        await pair.running.at_rest()
        samples = await pair.running.metrics()
        assert samples["flowprefill_proxy_leg_retries_total{leg=prefill}"] == 1
        assert samples[MET] == 1


async def test_a_request_that_no_pod_began_on_is_a_503_to_be_tried_again(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        for count in (1, 2):
            pair.prefill[0].fail[count] = broken(503)
        answer = await pair.running.complete()
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert "p0" not in answer.text
        await pair.running.at_rest()
        assert (await pair.running.metrics())[MISSED] == 1


async def test_a_second_death_is_a_502_and_a_miss(tmp_path):
    async with proxy_with_pods(tmp_path, num_prefill=2) as pair:
        for pod in pair.prefill:
            pod.fail[1] = broken()
        answer = await pair.running.complete()
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "upstream_failed"
        await pair.running.at_rest()
        samples = await pair.running.metrics()
        assert samples[MISSED] == 1
        assert samples["flowprefill_requests_total{code=502,outcome=error,slo_class=chat}"] == 1
        assert sum(len(pod.seen) for pod in pair.prefill) == 2


async def test_a_prefill_pod_that_refuses_connections_is_replaced_by_another(tmp_path):
    async with proxy_with_pods(tmp_path, num_prefill=1) as pair:
        endpoints = [pod.endpoint() for pod in (*pair.prefill, *pair.decode)]
        dead = pair.prefill[0].endpoint(name="a-dead", address="127.0.0.1:1", admin="127.0.0.1:1")
        pair.prefill[0].state = None
        pair.running.write_endpoints([dead, *endpoints])
        await until(lambda: len(pair.running.proxy.pods.candidates()) == 2)
        for _ in range(4):
            assert (await pair.running.complete()).status_code == 200
        await pair.running.at_rest()


async def test_a_decode_pod_that_refuses_the_leg_leaves_the_kv_for_another(tmp_path):
    async with proxy_with_pods(tmp_path, num_decode=2) as pair:
        for pod in pair.decode:
            pod.fail[1] = broken(503)
        pair.decode[1].fail.clear()
        answer = await pair.running.complete()
        assert answer.status_code == 200
        assert len(pair.prefill[0].seen) == 1  # no second prefill: the KV was never touched
        assert [len(pod.seen) for pod in pair.decode] == [1, 1]
        assert not pair.prefill[0].held
        await pair.running.at_rest()


async def test_a_decode_leg_that_dies_after_it_was_accepted_is_tried_with_a_fresh_prefill(tmp_path):
    async with proxy_with_pods(tmp_path, num_decode=2) as pair:
        pair.decode[0].break_after = 0  # it pulls the KV and dies before its first token
        answer = await pair.running.complete()
        assert answer.status_code == 200
        assert len(pair.prefill[0].seen) == 2
        ids = [seen.request_id for seen in pair.prefill[0].seen]
        assert len(set(ids)) == 2  # what the first attempt left is never taken for the second
        await until(lambda: ids[0] in pair.prefill[0].released)
        await pair.running.at_rest()
        samples = await pair.running.metrics()
        assert samples["flowprefill_proxy_leg_retries_total{leg=decode}"] == 1


async def test_kv_that_cannot_be_pulled_is_an_error_of_the_leg_and_prefilled_again(tmp_path):
    async with proxy_with_pods(tmp_path, num_decode=2) as pair:
        pair.prefill[0].gate.clear()
        request = asyncio.create_task(pair.running.complete())
        await until(lambda: pair.prefill[0].seen)
        pair.decode[0].gate.clear()
        pair.prefill[0].gate.set()
        await until(lambda: pair.decode[0].seen)
        pair.prefill[0].held.clear()  # the lease ended
        pair.decode[0].gate.set()
        assert (await request).status_code == 200
        assert len(pair.prefill[0].seen) == 2


async def test_a_stream_that_breaks_after_its_first_token_is_told_counted_as_missed_and_not_tried_again(
    tmp_path,
):
    async with proxy_with_pods(tmp_path, num_decode=2) as pair:
        for pod in pair.decode:
            pod.break_after = 1
        async with pair.running.http.stream(
            "POST", pair.running.url + "/v1/completions", json={**BODY, "stream": True}
        ) as response:
            assert response.status_code == 200
            lines = [line async for line in response.aiter_lines() if line]
        assert '"error"' in lines[-1]
        assert "data: [DONE]" not in lines
        assert sum(len(pod.seen) for pod in pair.decode) == 1
        await pair.running.at_rest()
        samples = await pair.running.metrics()
        assert samples[MISSED] == 1
        assert samples["flowprefill_requests_total{code=200,outcome=error,slo_class=chat}"] == 1


async def test_a_unary_answer_whose_stream_breaks_is_a_502(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        pair.decode[0].break_after = 2
        answer = await pair.running.complete("a b c")
        assert answer.status_code == 502


async def test_a_prefill_pod_without_kv_transfer_is_a_502_that_says_so(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        plain = {"choices": [], "usage": {}}
        for count in (1, 2):
            pair.prefill[0].fail[count] = lambda: JSONResponse(plain)
        answer = await pair.running.complete()
        assert answer.status_code == 502
        assert "kv_transfer_params" in answer.json()["error"]["message"]


async def test_a_colocated_pod_that_dies_before_its_first_byte_is_tried_again(tmp_path):
    async with proxy_with_colocated(tmp_path) as (running, pod):
        pod.fail[1] = broken()
        assert (await running.complete()).status_code == 200
        assert len(pod.seen) == 2
        await running.at_rest()


# -- time-outs, full queues, no pods


async def test_a_request_past_its_time_limit_is_a_504_that_tells_where_it_was(tmp_path, caplog):
    async with proxy_with_pods(tmp_path, request_timeout_s=0.3) as pair:
        pair.prefill[0].gate.clear()
        answer = await pair.running.complete()
        assert answer.status_code == 504
        assert answer.json()["error"]["message"].endswith("it was still in prefill")
        (told,) = (r for r in caplog.records if r.message == "request timed out")
        assert (told.stage, told.pod, told.slo_class) == ("prefill", "p0", "chat")
        await until(lambda: pair.prefill[0].seen[0].cancelled)
        await pair.running.at_rest()
        assert (await pair.running.metrics())[MISSED] == 1


async def test_a_stream_past_its_time_limit_ends_with_an_error_event(tmp_path):
    async with proxy_with_pods(tmp_path, request_timeout_s=0.5) as pair:
        pair.decode[0].free_tokens = 1
        pair.decode[0].token_gate.clear()
        async with pair.running.http.stream(
            "POST", pair.running.url + "/v1/completions", json={**BODY, "stream": True}
        ) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert '"timeout"' in lines[-1]
        assert "bound it with max_tokens" in lines[-1]
        await until(lambda: pair.decode[0].seen[0].cancelled)
        await pair.running.at_rest()


async def test_a_full_queue_is_a_429_with_retry_after_and_the_reason(tmp_path):
    async with proxy_with_pods(tmp_path, queue_limit=1) as pair:
        pair.prefill[0].gate.clear()
        pair.prefill[0].report(running=None, draining=True)  # nothing is dispatched: all wait at the proxy
        await until(lambda: pair.running.proxy.pods.candidates()[0].state.draining)
        waiting = asyncio.create_task(pair.running.complete())
        await until(lambda: pair.running.proxy.dispatcher.num_waiting == 1)
        answer = await pair.running.complete()
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        pair.prefill[0].gate.set()
        pair.prefill[0].report()
        assert (await waiting).status_code == 200
        await pair.running.at_rest()
        samples = await pair.running.metrics()
        assert samples["flowprefill_requests_total{code=429,outcome=shed,slo_class=chat}"] == 1
        assert samples[MISSED] == 1
        assert samples[MET] == 1


async def test_a_class_that_sheds_gets_a_429_when_no_pod_can_make_it(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        pair.prefill[0].report(prediction=(0.0, 1.0, 0.0, 0.0))  # a second per token
        await until(lambda: pair.running.proxy.pods.candidates()[0].coefficients)
        strict = {"headers": {"x-flowprefill-slo-class": "strict"}}
        answer = await pair.running.complete(**strict)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "shed"
        assert not pair.prefill[0].seen
        assert (await pair.running.complete()).status_code == 200  # another class waits its turn


async def test_no_pod_is_a_503_after_a_bounded_wait(tmp_path):
    async with running_proxy(tmp_path, pod_wait_s=0.1) as running:
        answer = await running.complete()
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert answer.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
        assert (await running.http.get(running.admin_url + "/ready")).status_code == 200


# -- clients that leave


async def test_a_client_that_leaves_the_queue_frees_its_place(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        pair.prefill[0].report(draining=True)
        await until(lambda: pair.running.proxy.pods.candidates()[0].state.draining)
        await leave(pair.running, BODY, lambda: pair.running.proxy.dispatcher.num_waiting == 1)
        await pair.running.at_rest()
        assert not pair.prefill[0].seen
        samples = await pair.running.metrics()
        assert samples["flowprefill_requests_total{code=499,outcome=cancelled,slo_class=chat}"] == 1
        assert samples[MISSED] == samples[MET] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_during_prefill_cancels_the_leg(tmp_path, stream):
    async with proxy_with_pods(tmp_path) as pair:
        pair.prefill[0].gate.clear()
        await leave(pair.running, {**BODY, "stream": stream}, lambda: pair.prefill[0].seen)
        await until(lambda: pair.prefill[0].seen[0].cancelled)
        await pair.running.at_rest()
        assert not pair.decode[0].seen


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_kv_is_pulled_has_it_given_back(tmp_path, stream):
    async with proxy_with_pods(tmp_path) as pair:
        pair.decode[0].gate.clear()
        await leave(pair.running, {**BODY, "stream": stream}, lambda: pair.decode[0].seen)
        await until(lambda: pair.decode[0].seen[0].cancelled)
        await until(lambda: not pair.prefill[0].held)
        assert pair.prefill[0].released == [pair.prefill[0].seen[0].request_id]
        await pair.running.at_rest()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_during_decode_cancels_it(tmp_path, stream):
    async with proxy_with_pods(tmp_path) as pair:
        pair.decode[0].free_tokens = 1
        pair.decode[0].token_gate.clear()
        await leave(
            pair.running, {**BODY, "stream": stream}, lambda: pair.running.proxy.follow_up._all._recent
        )
        await until(lambda: pair.decode[0].seen[0].cancelled)
        await pair.running.at_rest()
        samples = await pair.running.metrics()
        assert samples["flowprefill_requests_total{code=499,outcome=cancelled,slo_class=chat}"] == 1
        assert samples[MET] == 1  # its first token had left in time


async def test_a_client_that_leaves_after_its_deadline_is_a_miss(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        pair.prefill[0].gate.clear()
        clock = pair.running.proxy.clock
        began_s = clock.now_s()
        body = {**BODY, "vllm_xargs": {"ttft_slo": 0.5}}
        await leave(pair.running, body, lambda: clock.now_s() > began_s + 0.8)
        await pair.running.at_rest()
        assert (await pair.running.metrics())[MISSED] == 1


async def test_a_client_that_leaves_one_of_several_prompts_frees_them_all(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        pair.decode[0].gate.clear()
        body = {**BODY, "prompt": ["a b", "c d", "e f"]}
        await leave(pair.running, body, lambda: len(pair.decode[0].seen) == 3)
        await until(lambda: not pair.prefill[0].held)
        await until(lambda: all(seen.cancelled for seen in pair.decode[0].seen))
        await pair.running.at_rest()


async def test_a_client_that_sends_half_a_body_and_leaves_is_no_slo_event(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        host, port = pair.running.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
        writer.write(head.encode())
        await writer.drain()
        await until(lambda: pair.running.proxy.lifecycle.in_flight == 1)
        writer.close()
        await pair.running.at_rest()
        samples = await pair.running.metrics()
        assert samples["flowprefill_requests_total{code=499,outcome=cancelled,slo_class=other}"] == 1


async def test_a_prefill_pod_whose_release_path_is_missing_does_no_harm(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:

        async def not_there(request):
            pair.prefill[0].released.append("asked")
            return Response(status_code=404)

        pair.prefill[0]._release = not_there
        async with serving(pair.prefill[0].app()) as address:
            pair.prefill[0].address = address
            pair.running.write_endpoints([pair.prefill[0].endpoint(), pair.decode[0].endpoint()])
            await until(lambda: [p.first[0].address for p in pair.running.proxy.pods.revisions] == [address])
            pair.decode[0].gate.clear()
            await leave(pair.running, BODY, lambda: pair.decode[0].seen)
            await until(lambda: pair.prefill[0].released == ["asked"])
            pair.decode[0].gate.set()
            assert (await pair.running.complete()).status_code == 200
