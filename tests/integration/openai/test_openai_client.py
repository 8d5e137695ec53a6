"""OpenAI's own Python client, unmodified, against a colocated pod."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from support.pods import MODEL, RunningPod, expected_text, pod_config, running_pod, simulated_engine


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[RunningPod]:
    async with running_pod("colocated", tmp_path, config=pod_config(mode="Colocated")) as running:
        yield running


@pytest.fixture
async def client(pod: RunningPod) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{pod.api.base_url}/v1", api_key="any", max_retries=0) as made:
        yield made


async def test_models_and_a_completion(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    answer = await client.completions.create(model=MODEL, prompt="A quick test", max_tokens=8, temperature=0)
    assert answer.choices[0].text == expected_text(simulated_engine(), "A quick test", 8)
    assert answer.usage is not None
    assert answer.usage.total_tokens == len("A quick test") + 8


async def test_a_streamed_chat_with_usage_and_choices(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell me"}],
        max_completion_tokens=6,
        temperature=0,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons, usage = {0: "", 1: ""}, {}, None
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    expected = expected_text(simulated_engine(), "user: Tell me\n", 6)
    assert texts == {0: expected, 1: expected}
    assert reasons == {0: "length", 1: "length"}
    assert usage is not None
    assert usage.completion_tokens == 12


async def test_errors_are_the_clients_own_classes(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], response_format={"type": "json_object"}
        )
    assert caught.value.param == "response_format"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL, prompt="x" * 5000)
    assert caught.value.code == "context_length_exceeded"


async def test_a_client_that_closes_its_stream_frees_the_pod(
    pod: RunningPod, client: openai.AsyncOpenAI
) -> None:
    stream = await client.completions.create(
        model=MODEL, prompt="x", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.close()
    await pod.until_metric("flowprefill_decode_sequences", 0)
    await pod.until_metric("flowprefill_kv_blocks_free", pod.engine.spec.num_kv_blocks)
