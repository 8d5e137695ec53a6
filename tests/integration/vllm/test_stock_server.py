"""Stock vLLM answers as transformers does: what every comparison with a preempted server stands on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from flowprefill.engines.tokenizer import load_tokenizer
from support.embedded_model import embedded_model
from support.pods import until_async
from support.vllm.completions import completion, leave_after, leave_at_once, streamed
from support.vllm.models import FAMILIES, model_directory, small
from support.vllm.reference import Greedy, greedy
from support.vllm.server import VllmServer, vllm_server
from support.vllm.tokens import random_prompt

NUM_TOKENS = 12
PROMPTS = [random_prompt(length, seed=length) for length in (5, 130, 700)]
MODELS = [*FAMILIES, "embedded"]
LOGPROB_TOLERANCE = 2e-4
"""Kernels add in different orders: 2e-5 was the most seen over these models, and a token's margin is far above both."""


def directory(name: str) -> Path:
    return embedded_model() if name == "embedded" else model_directory(small(name))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def reference(python: Path) -> dict[Path, list[Greedy]]:
    """transformers' answers for all models, from one process."""
    return greedy(python, {directory(name): PROMPTS for name in MODELS}, NUM_TOKENS)


@pytest.fixture(scope="module", params=MODELS)
def server(
    request: pytest.FixtureRequest, python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    log = tmp_path_factory.mktemp("vllm") / f"{request.param}.log"
    with vllm_server(python, directory(request.param), log) as running:
        yield running


async def test_greedy_tokens_and_their_logprobs_are_those_of_transformers(
    server: VllmServer, reference: dict[Path, list[Greedy]]
) -> None:
    expected = reference[server.model]
    assert min(min(one.margins) for one in expected) > 10 * LOGPROB_TOLERANCE, "near ties prove nothing"
    async with server.client() as client:
        whole = await asyncio.gather(*(completion(client, p, NUM_TOKENS, logprobs=0) for p in PROMPTS))
        stream = await asyncio.gather(*(streamed(client, p, NUM_TOKENS, logprobs=0) for p in PROMPTS))
    for one, streaming, wanted in zip(whole, stream, expected, strict=True):
        assert one.token_ids == streaming.token_ids == wanted.token_ids
        assert one.logprobs == pytest.approx(wanted.logprobs, abs=LOGPROB_TOLERANCE)
        assert streaming.logprobs == pytest.approx(wanted.logprobs, abs=LOGPROB_TOLERANCE)
        assert one.finish_reason == streaming.finish_reason == "length"
        assert streaming.ttft_s is not None


async def test_a_text_prompt_is_tokenized_as_the_models_own_tokenizer_does(
    server: VllmServer, reference: dict[Path, list[Greedy]]
) -> None:
    text = load_tokenizer(server.model).decode(PROMPTS[1])
    ids = load_tokenizer(server.model).encode(text)
    async with server.client() as client:
        by_text, by_ids = await completion(client, text, 4), await completion(client, ids, 4)
    assert by_text.token_ids == by_ids.token_ids
    # A character whose last bytes are still to come is held back.
    assert load_tokenizer(server.model).decode(by_text.token_ids).startswith(by_text.text)


async def test_a_client_that_leaves_ends_its_request_and_leaves_nothing_held(server: VllmServer) -> None:
    async with server.client() as client:

        async def is_idle() -> bool:
            return (
                await gauge(client, "vllm:num_requests_running")
                == 0
                == await gauge(client, "vllm:num_requests_waiting")
            )

        before = server.usage()
        for _ in range(5):
            assert await leave_after(client, PROMPTS[0], 5000, tokens_before=3) >= 3
        assert await leave_at_once(client, random_prompt(2000, seed=1), after_s=0.05)
        await until_async(is_idle, what="no request running or waiting")
        again = await completion(client, PROMPTS[0], 4)
    after = server.usage()
    assert len(again.token_ids) == 4
    assert after.processes == before.processes
    assert after.shared_memory == before.shared_memory


async def gauge(client: httpx.AsyncClient, name: str) -> float:
    """The value of a metric of one series."""
    text = (await client.get("/metrics")).text
    found = re.search(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    assert found is not None, f"no {name} in /metrics"
    return float(found[1])
