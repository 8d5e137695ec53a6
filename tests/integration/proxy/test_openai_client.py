"""The public OpenAI client, unmodified, through the proxy."""

from __future__ import annotations

import asyncio

import openai
import pytest
from starlette.responses import Response

from support.proxy_pods import until
from support.proxy_under_test import Running, proxy_with_pods

MESSAGES = [{"role": "user", "content": "one two three four"}]


def client(running: Running, **options) -> openai.AsyncOpenAI:
    defaults = {"api_key": "none", "base_url": running.url + "/v1", "max_retries": 0}
    return openai.AsyncOpenAI(**{**defaults, **options})


async def test_chat_and_completions_answer_with_usage(tmp_path):
    async with proxy_with_pods(tmp_path) as pair, client(pair.running) as api:
        chat = await api.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=2)
        assert chat.choices[0].message.content == "one two "
        assert chat.usage.prompt_tokens == 4
        text = await api.completions.create(model="tiny", prompt="a b", max_tokens=2, n=2)
        assert [choice.text for choice in text.choices] == ["a b ", "a b "]
        assert text.usage.completion_tokens == 4


async def test_a_stream_gives_chunks_and_usage(tmp_path):
    async with proxy_with_pods(tmp_path) as pair, client(pair.running) as api:
        stream = await api.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == "one two three "
        assert chunks[-1].usage.completion_tokens == 3


async def test_models_can_be_listed_and_looked_up(tmp_path):
    async with proxy_with_pods(tmp_path) as pair, client(pair.running) as api:
        assert [model.id async for model in api.models.list()] == ["tiny"]
        assert (await api.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError):
            await api.models.retrieve("other")


async def test_errors_arrive_as_the_clients_own_exceptions(tmp_path):
    async with proxy_with_pods(tmp_path) as pair, client(pair.running) as api:
        with pytest.raises(openai.NotFoundError) as missing:
            await api.chat.completions.create(model="other", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            await api.chat.completions.create(
                model="tiny", messages=MESSAGES, response_format={"type": "json_object"}
            )
        assert refused.value.param == "response_format"
        for count in (1, 2):
            pair.prefill[0].fail[count] = lambda: Response(status_code=500)
        with pytest.raises(openai.InternalServerError):
            await api.chat.completions.create(model="tiny", messages=MESSAGES)


async def test_a_stream_that_breaks_raises_in_the_client(tmp_path):
    async with proxy_with_pods(tmp_path) as pair, client(pair.running) as api:
        pair.decode[0].break_after = 1
        stream = await api.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3, stream=True)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass


async def test_the_clients_retries_get_through_when_a_place_is_free_again(tmp_path):
    async with proxy_with_pods(tmp_path, queue_limit=1) as pair, client(pair.running, max_retries=5) as api:
        pod, running = pair.prefill[0], pair.running
        pod.report(draining=True)
        await until(lambda: running.proxy.pods.candidates()[0].state.draining)
        waiting = asyncio.create_task(running.complete())
        await until(lambda: running.proxy.dispatcher.num_waiting == 1)
        retried = asyncio.create_task(
            api.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1)
        )
        await running.until_sample("flowprefill_requests_total{code=429,outcome=shed,slo_class=chat}", 1)
        pod.report()
        assert (await waiting).status_code == 200
        assert (await retried).choices[0].message.content == "one "


async def test_the_clients_time_out_frees_the_request(tmp_path):
    async with proxy_with_pods(tmp_path) as pair, client(pair.running, timeout=0.3) as api:
        pair.prefill[0].gate.clear()
        with pytest.raises(openai.APITimeoutError):
            await api.chat.completions.create(model="tiny", messages=MESSAGES)
        await until(lambda: pair.prefill[0].seen[0].cancelled)
        await pair.running.at_rest()


async def test_a_key_is_sent_and_asked_for(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret-1\n")
    async with proxy_with_pods(tmp_path, keys=keys) as pair:
        async with client(pair.running, api_key="secret-1") as api:
            assert (await api.completions.create(model="tiny", prompt="a")).choices
        async with client(pair.running, api_key="wrong") as api:
            with pytest.raises(openai.AuthenticationError):
                await api.completions.create(model="tiny", prompt="a")


async def test_extra_headers_and_body_carry_an_slo(tmp_path):
    async with proxy_with_pods(tmp_path) as pair, client(pair.running) as api:
        await api.completions.create(model="tiny", prompt="a", extra_headers={"x-llm-d-slo-ttft-ms": "700"})
        await api.completions.create(
            model="tiny", prompt="a", extra_body={"vllm_xargs": {"ttft_slo": 0.8, "arrival": 5.0}}
        )
        targets = [seen.body["vllm_xargs"]["ttft_target"] for seen in pair.prefill[0].seen]
        assert targets == [0.7, 0.8]


async def test_many_clients_at_once_are_all_served(tmp_path):
    async with proxy_with_pods(tmp_path, num_prefill=2, num_decode=2, queue_limit=1000) as pair:
        async with client(pair.running) as api:
            answers = await asyncio.gather(
                *(
                    api.chat.completions.create(
                        model="tiny", messages=[{"role": "user", "content": f"n{i} x"}], max_tokens=1
                    )
                    for i in range(150)
                )
            )
        assert [a.choices[0].message.content for a in answers] == [f"n{i} " for i in range(150)]
        await pair.running.at_rest()
