"""What a client gets: answers, streams, several prompts, choices, headers, refusals."""

from __future__ import annotations

import json

import pytest

from support.proxy_pods import refusal, until
from support.proxy_under_test import proxy_with_colocated, proxy_with_pods

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "one two three"}], "max_tokens": 2}


async def events_of(response) -> list[str]:
    return [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]


async def test_a_chat_answer_is_assembled_from_the_stream(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        answer = (await pair.running.post("/v1/chat/completions", CHAT)).json()
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["message"]["content"] == "one two "
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 5
        leg = pair.prefill[0].seen[0].body
        assert leg["max_completion_tokens"] == leg["max_tokens"] == 1


async def test_a_stream_has_its_headers_its_chunks_and_done(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
        async with pair.running.http.stream(
            "POST", pair.running.url + "/v1/chat/completions", json=body, headers={"x-request-id": "mine-1"}
        ) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["x-accel-buffering"] == "no"
            assert response.headers["cache-control"] == "no-cache"
            assert response.headers["x-request-id"] == "mine-1"
            events = await events_of(response)
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        text = "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])
        assert text == "one two "
        assert chunks[-1]["usage"]["prompt_tokens"] == 3
        await pair.running.at_rest()
        samples = await pair.running.metrics()
        assert samples["flowprefill_request_ttft_seconds_count{slo_class=chat,streaming=true}"] == 1


async def test_a_stream_without_usage_asks_for_none(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        async with pair.running.http.stream(
            "POST", pair.running.url + "/v1/chat/completions", json={**CHAT, "stream": True}
        ) as response:
            events = await events_of(response)
        assert not any('"usage"' in event for event in events)
        assert "stream_options" not in pair.decode[0].seen[0].body


async def test_the_parts_of_ttft_sum_to_it(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        for _ in range(3):
            await pair.running.complete()
        await pair.running.at_rest()
        samples = await pair.running.metrics()
        parts = ("queue", "prefill", "kv_transfer", "first_decode")
        total = sum(samples[f"flowprefill_request_{part}_seconds_sum{{slo_class=chat}}"] for part in parts)
        ttft = samples["flowprefill_request_ttft_seconds_sum{slo_class=chat,streaming=false}"]
        assert total == pytest.approx(ttft, rel=1e-6)
        assert all(samples[f"flowprefill_request_{p}_seconds_count{{slo_class=chat}}"] == 3 for p in parts)


async def test_several_prompts_are_split_and_their_choices_numbered_in_order(tmp_path):
    async with proxy_with_pods(tmp_path, num_prefill=2, num_decode=2) as pair:
        prompts = ["a b", "c d", "e f"]
        answer = (await pair.running.complete(prompts, n=2, max_tokens=2)).json()
        texts = [choice["text"] for choice in answer["choices"]]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
        assert texts == ["a b ", "a b ", "c d ", "c d ", "e f ", "e f "]
        assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 12, "total_tokens": 18}
        seen = [s for pod in pair.prefill for s in pod.seen]
        assert len(seen) == 3
        assert all(s.body["n"] == 1 for s in seen)
        await pair.running.at_rest()
        samples = await pair.running.metrics()
        assert samples["flowprefill_requests_total{code=200,outcome=ok,slo_class=chat}"] == 1


async def test_several_prompts_stream_as_one_answer(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        body = {"model": "tiny", "prompt": ["a b", "c d"], "max_tokens": 2, "stream": True}
        body["stream_options"] = {"include_usage": True}
        async with pair.running.http.stream(
            "POST", pair.running.url + "/v1/completions", json=body
        ) as response:
            events = await events_of(response)
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert len({chunk["id"] for chunk in chunks}) == 1
        texts = {0: "", 1: ""}
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == {0: "a b ", 1: "c d "}
        assert [chunk["usage"] for chunk in chunks if chunk.get("usage")] == [
            {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}
        ]


async def test_one_prompt_of_several_that_fails_fails_the_request_and_stops_the_others(tmp_path):
    async with proxy_with_pods(tmp_path, num_prefill=1) as pair:
        refuse = pair.decode[0]
        refuse.token_gate.clear()
        pair.prefill[0].fail[2] = lambda: refusal("context_length_exceeded")
        answer = await pair.running.complete(["a b", "c d", "e f"])
        assert answer.status_code == 400
        await pair.running.at_rest()
        await until(lambda: not pair.decode[0].running)


async def test_token_id_prompts_are_served_alone_and_in_lists(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        alone = (await pair.running.complete([5, 6, 7], max_tokens=2)).json()
        assert [c["text"] for c in alone["choices"]] == ["5 6 "]
        several = (await pair.running.complete([[5, 6], [7, 8]], max_tokens=2)).json()
        assert [c["text"] for c in several["choices"]] == ["5 6 ", "7 8 "]


async def test_n_choices_go_with_the_decode_leg(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        answer = (await pair.running.complete("a b", n=3, max_tokens=1)).json()
        assert len(answer["choices"]) == 3
        assert pair.prefill[0].seen[0].body["n"] == 1
        assert pair.decode[0].seen[0].body["n"] == 3


async def test_min_tokens_is_capped_for_prefill_and_kept_for_decode(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        await pair.running.complete("a b", min_tokens=10, max_tokens=12)
        assert pair.prefill[0].seen[0].body["min_tokens"] == 1
        assert pair.prefill[0].seen[0].body["vllm_xargs"]["decode_max_tokens"] == 12
        assert pair.decode[0].seen[0].body["min_tokens"] == 10


async def test_debug_headers_tell_the_class_the_target_and_the_ttft(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        plain = await pair.running.complete()
        assert "x-flowprefill-slo-class" not in plain.headers
        headers = {"x-flowprefill-debug": "1", "x-slo-ttft-ms": "700"}
        told = await pair.running.complete(headers=headers)
        assert told.headers["x-flowprefill-slo-class"] == "chat"
        assert told.headers["x-flowprefill-slo-ttft-ms"] == "700"
        assert float(told.headers["x-flowprefill-ttft-ms"]) > 0
        body = {"model": "tiny", "prompt": "a", "stream": True, "max_tokens": 1}
        streamed = await pair.running.post("/v1/completions", body, headers=headers)
        assert float(streamed.headers["x-flowprefill-ttft-ms"]) > 0


async def test_a_bad_slo_header_is_counted_and_the_request_served_by_its_class(tmp_path):
    values = {
        "": "empty",
        "abc": "not_a_number",
        "-1": "not_positive",
        "0": "not_positive",
        "1e3": "not_a_number",
        "\u0665\u0660\u0660": "not_a_number",
    }
    async with proxy_with_pods(tmp_path) as pair:
        for value in values:
            answer = await pair.running.complete(headers={b"x-llm-d-slo-ttft-ms": value.encode()})
            assert answer.status_code == 200
            xargs = pair.prefill[0].seen[-1].body["vllm_xargs"]
            assert (xargs["ttft_target"], xargs["slo_class"]) == (1.0, "chat")
        samples = await pair.running.metrics()
        for reason in set(values.values()):
            name = f"flowprefill_slo_header_invalid_total{{reason={reason},source=llmd_ttft_header}}"
            assert samples[name] == list(values.values()).count(reason)


@pytest.mark.parametrize(("value", "target"), [("1", 0.5), ("9223372036854775807", 4.0), ("2500", 2.5)])
async def test_a_number_is_clamped_to_its_class_and_reaches_the_pod_as_a_budget(tmp_path, value, target):
    async with proxy_with_pods(tmp_path) as pair:
        await pair.running.complete(
            headers={"x-slo-ttft-ms": value}, vllm_xargs={"arrival": 1.0, "ttft_slo": 99.0, "own": 1}
        )
        xargs = pair.prefill[0].seen[0].body["vllm_xargs"]
        assert xargs["ttft_target"] == target
        assert 0 < xargs["ttft_slo"] < target
        assert "arrival" not in xargs
        assert xargs["own"] == 1
        assert "arrival" not in pair.decode[0].seen[0].body["vllm_xargs"]


async def test_a_service_tier_and_a_class_header_choose_the_class(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        await pair.running.complete(service_tier="flex")
        await pair.running.complete(headers={"x-flowprefill-slo-class": "strict"})
        classes = [seen.body["vllm_xargs"]["slo_class"] for seen in pair.prefill[0].seen]
        assert classes == ["batch", "strict"]


async def test_routing_headers_of_clients_never_reach_a_pod(tmp_path):
    sent = {
        "x-prefiller-host-port": "evil:1",
        "x-data-parallel-host-port": "evil:1",
        "x-gateway-destination-endpoint": "evil:1",
        "x-llm-d-slo-ttft-ms": "700",
        "x-request-id": "theirs",
        "traceparent": "00-a-b-01",
    }
    async with proxy_with_pods(tmp_path) as pair:
        await pair.running.complete(headers=sent)
        for pod in (pair.prefill[0], pair.decode[0]):
            got = pod.seen[0].headers
            assert not set(sent) - {"x-request-id", "traceparent"} & set(got)
            assert not {"x-prefiller-host-port", "x-gateway-destination-endpoint"} & set(got)
            assert got["traceparent"] == "00-a-b-01"
            assert got["x-request-id"].startswith("theirs-")


async def test_two_requests_with_one_id_do_not_share_kv(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        for _ in range(2):
            answer = await pair.running.complete(headers={"x-request-id": "same"})
            assert answer.headers["x-request-id"] == "same"
        ids = {seen.request_id for seen in pair.prefill[0].seen}
        assert len(ids) == 2


DEEP = "[" * 2000 + "]" * 2000


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_broken_body_is_a_400_in_the_envelope_and_no_slo_event(tmp_path, path):
    bodies = [
        b"\xff",
        b"[]",
        DEEP.encode(),
        b"",
        b'{"model":1}',
        b'{"model":"tiny","prompt":null}',
        b'"x"',
        b"{",
        b"null",
    ]
    async with proxy_with_pods(tmp_path) as pair:
        for body in bodies:
            answer = await pair.running.http.post(pair.running.url + path, content=body)
            assert answer.status_code == 400, body
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert "Traceback" not in answer.text
        samples = await pair.running.metrics()
        assert samples["flowprefill_requests_total{code=400,outcome=error,slo_class=other}"] == len(bodies)
        assert sum(v for k, v in samples.items() if k.startswith("flowprefill_ttft_slo_requests_total")) == 0
        assert not pair.prefill[0].seen
        assert (await pair.running.complete()).status_code == 200


async def test_an_unknown_model_is_a_404(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        answer = await pair.running.post("/v1/completions", {"model": "other", "prompt": "a"})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"


async def test_a_body_over_the_limit_is_a_413_before_it_is_read(tmp_path):
    async with proxy_with_pods(tmp_path, max_body_bytes=1000) as pair:
        answer = await pair.running.complete("x" * 2000)
        assert answer.status_code == 413

        async def chunks():
            for _ in range(100):
                yield b"x" * 100

        chunked = await pair.running.http.post(pair.running.url + "/v1/completions", content=chunks())
        assert chunked.status_code == 413
        assert not pair.prefill[0].seen


async def test_a_long_prompt_is_handled_off_the_loop_and_served(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        answer = await pair.running.complete("word " * 4000, max_tokens=1)
        assert answer.status_code == 200
        assert answer.json()["usage"]["prompt_tokens"] == 4000


async def test_a_pods_own_400_reaches_the_client_as_it_is_and_is_not_tried_again(tmp_path):
    async with proxy_with_pods(tmp_path, num_prefill=2) as pair:
        for pod in pair.prefill:
            pod.fail[1] = lambda: refusal("context_length_exceeded")
        answer = await pair.running.complete()
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.headers["content-type"] == "application/json"
        assert sum(len(pod.seen) for pod in pair.prefill) == 1
        await pair.running.at_rest()
        samples = await pair.running.metrics()
        assert samples["flowprefill_requests_total{code=400,outcome=error,slo_class=chat}"] == 1
        assert samples["flowprefill_ttft_slo_requests_total{result=missed,slo_class=chat}"] == 0


async def test_other_paths_are_served_or_clean_404_and_405(tmp_path):
    expected = [
        ("GET", "/v1/models", 200),
        ("GET", "/v1/models?x=1", 200),
        ("GET", "/v1/models/tiny", 200),
        ("GET", "/v1/models/other", 404),
        ("GET", "/health", 200),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/metrics", 404),
        ("GET", "/docs", 404),
        ("GET", "/", 404),
        ("POST", "/invocations", 404),
    ]
    async with proxy_with_pods(tmp_path) as pair:
        for method, path, status in expected:
            answer = await pair.running.http.request(method, pair.running.url + path)
            assert answer.status_code == status, path
            if status >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert answer.headers["x-request-id"]


async def test_a_form_post_is_a_400(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        answer = await pair.running.http.post(
            pair.running.url + "/v1/completions", data={"model": "tiny"}, files={"f": b"x"}
        )
        assert answer.status_code == 400


async def test_a_query_string_does_not_disturb_a_request(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        assert (await pair.running.post("/v1/completions?beta=true", body)).status_code == 200


async def test_keys_are_asked_for_on_the_api_and_not_by_probes(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret-1\n")
    async with proxy_with_pods(tmp_path, keys=keys) as pair:
        assert (await pair.running.complete()).status_code == 401
        assert (await pair.running.complete(headers={"authorization": "Bearer no"})).status_code == 401
        assert (await pair.running.complete(headers={"authorization": "Bearer secret-1"})).status_code == 200
        assert (await pair.running.http.get(pair.running.url + "/v1/models")).status_code == 401
        assert (await pair.running.http.get(pair.running.url + "/health")).status_code == 200
        assert (await pair.running.http.get(pair.running.admin_url + "/ready")).status_code == 200


async def test_colocated_streams_and_splits_prompts_too(tmp_path):
    async with proxy_with_colocated(tmp_path) as (running, pod):
        answer = (await running.complete(["a b", "c d"], max_tokens=2)).json()
        assert [c["text"] for c in answer["choices"]] == ["a b ", "c d "]
        assert all("kv_transfer_params" not in seen.body for seen in pod.seen)
        await running.at_rest()


async def test_chunks_are_passed_on_as_they_come(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        pair.decode[0].free_tokens = 1
        pair.decode[0].token_gate.clear()
        body = {"model": "tiny", "prompt": "a b c", "max_tokens": 3, "stream": True}
        async with pair.running.http.stream(
            "POST", pair.running.url + "/v1/completions", json=body
        ) as response:
            lines = response.aiter_lines()
            first = await anext(lines)  # the pod holds the second token back until this one is here
            assert json.loads(first[6:])["choices"][0]["text"] == "a "
            pair.decode[0].token_gate.set()
            rest = [line async for line in lines]
        assert rest[-2:] == ["data: [DONE]", ""]
