"""A load for a prefill/decode pair: long prompts that short ones preempt on the prefill pod, and what must come of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx

from flowprefill.wire import Endpoint, PodState
from support.proxy_under_test import Running, running_proxy
from support.vllm.completions import body
from support.vllm.pod import LIVE, LONG_TTFT_S, SHORT_TTFT_S, VllmPod
from support.vllm.server import REQUEST_TIMEOUT_S
from support.vllm.tokens import random_prompt

NUM_TOKENS = 8
BLOCK = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request of the load."""

    token_ids: tuple[int, ...]
    ttft_s: float

    @property
    def is_long(self) -> bool:
        return self.ttft_s == LONG_TTFT_S


Answer = TypeVar("Answer")
Ask = Callable[[Prompt], Awaitable[Answer]]
"""Has a prompt answered."""


def load(
    seed: int, *, num_long: int = 3, shorts_each: int = 3, long_tokens: int = 4000
) -> tuple[Prompt, ...]:
    """`num_long` long prompts, each followed by its short ones. No two share a prefix.

    One short prompt in three is shorter than a block, one ends with one.
    """
    lengths = (BLOCK - 3, 3 * BLOCK, 5 * BLOCK + 11)
    prompts = []
    for i in range(num_long):
        long = random_prompt(long_tokens + 37 * i, seed=seed + 100 * i)
        prompts.append(Prompt(token_ids=tuple(long), ttft_s=LONG_TTFT_S))
        for k in range(shorts_each):
            short = random_prompt(lengths[k % len(lengths)], seed=seed + 100 * i + k + 1)
            prompts.append(Prompt(token_ids=tuple(short), ttft_s=SHORT_TTFT_S))
    return tuple(prompts)


async def preempting(pod: VllmPod, prompts: Sequence[Prompt], ask: Ask[Answer]) -> list[Answer]:
    """Have all answered: the short ones that follow a long one are sent while it runs on the prefill pod.

    Answers in the prompts' order.
    """
    answers: list[asyncio.Task[Answer]] = []
    async with asyncio.TaskGroup() as group, pod.states() as states:
        for prompt in prompts:
            answers.append(group.create_task(_asked(ask, prompt)))
            if prompt.is_long:
                await until_runs(states, len(prompt.token_ids))
    return [answer.result() for answer in answers]


async def _asked(ask: Ask[Answer], prompt: Prompt) -> Answer:
    return await ask(prompt)


async def until_runs(states: AsyncIterator[PodState], num_tokens: int) -> None:
    """Read states until a prompt of so many tokens is being computed."""
    async with asyncio.timeout(60):
        async for state in states:
            if _runs(state, num_tokens):
                return


def _runs(state: PodState, num_tokens: int) -> bool:
    """Whether a prompt of so many tokens is being computed, or already stands aside for another."""
    tasks = [*([state.running] if state.running is not None else []), *state.suspended]
    return any(task.num_tokens == num_tokens for task in tasks)


def stock_endpoint(role: str, port: int) -> Endpoint:
    """A server of vLLM alone as discovery tells the proxy of it: the port it has for everything."""
    address = f"127.0.0.1:{port}"
    return Endpoint(name=f"{role}-0", role=role, revision="r1", address=address, admin=address)


PROXY = {
    "model": {"uri": "file:///none", "servedName": "model", "maxModelLen": 8192},
    "engine": {"type": "vllm", "blockSize": BLOCK},
    "proxy": {"queueLimit": 100, "requestTimeoutSeconds": 120},
}


@asynccontextmanager
async def proxied(directory: Path, *endpoints: Endpoint) -> AsyncIterator[tuple[Running, Ask[str]]]:
    """Our proxy in front of these pods, and a client of it; long prompts are in a patient class. Answers are text."""
    async with running_proxy(directory, endpoints, config=PROXY, live=LIVE) as running:
        kinds = {True: "batch", False: "chat"}
        clients = {
            is_long: httpx.AsyncClient(
                base_url=running.url, timeout=REQUEST_TIMEOUT_S, headers={"x-flowprefill-slo-class": name}
            )
            for is_long, name in kinds.items()
        }
        try:

            async def ask(prompt: Prompt) -> str:
                request = body(prompt.token_ids, NUM_TOKENS)
                del request["return_token_ids"]
                answer = await clients[prompt.is_long].post("/v1/completions", json=request)
                assert answer.status_code == 200, answer.text
                return str(answer.json()["choices"][0]["text"])

            yield running, ask
        finally:
            for client in clients.values():
                await client.aclose()
