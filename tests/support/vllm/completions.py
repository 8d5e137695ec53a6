"""Completions as token ids and logprobs, whole or as they stream, and clients that leave early."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One choice. `ttft_s` is from sending the request to the first token; None for a completion that came whole."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str | None
    num_cached_tokens: int | None = None
    ttft_s: float | None = None
    kv_transfer_params: dict[str, Any] | None = None


def body(prompt: str | Sequence[int], num_tokens: int, **changes: Any) -> dict[str, Any]:
    """A greedy request for exactly `num_tokens` tokens and their ids; `changes` replace or add fields."""
    return {
        "model": "model",
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **changes,
    }


async def completion(
    client: httpx.AsyncClient, prompt: str | Sequence[int], num_tokens: int, **changes: Any
) -> Completion:
    """A completion that comes whole. `logprobs=0` in `changes` asks for the chosen tokens' logprobs."""
    answer = await client.post("/v1/completions", json=body(prompt, num_tokens, **changes))
    assert answer.status_code == 200, answer.text
    told = answer.json()
    (choice,) = told["choices"]
    details = told["usage"].get("prompt_tokens_details") or {}
    return Completion(
        token_ids=tuple(choice["token_ids"]),
        logprobs=_logprobs(choice),
        text=choice["text"],
        finish_reason=choice["finish_reason"],
        num_cached_tokens=details.get("cached_tokens"),
        kv_transfer_params=told.get("kv_transfer_params"),
    )


async def streamed(
    client: httpx.AsyncClient, prompt: str | Sequence[int], num_tokens: int, **changes: Any
) -> Completion:
    """A completion that streams, with the time to its first token."""
    token_ids: list[int] = []
    logprobs: list[float] = []
    text, finish_reason, ttft_s = "", None, None
    start_s = time.monotonic()
    async for choice in stream(client, prompt, num_tokens, **changes):
        if ttft_s is None and choice["token_ids"]:
            ttft_s = time.monotonic() - start_s
        token_ids += choice["token_ids"] or ()
        logprobs += _logprobs(choice)
        text += choice["text"]
        finish_reason = choice["finish_reason"] or finish_reason
    return Completion(
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        text=text,
        finish_reason=finish_reason,
        ttft_s=ttft_s,
    )


async def stream(
    client: httpx.AsyncClient, prompt: str | Sequence[int], num_tokens: int, **changes: Any
) -> AsyncIterator[dict[str, Any]]:
    """The choice of each event until `[DONE]`; closing the iterator closes the connection, which aborts the request."""
    request = body(prompt, num_tokens, stream=True, **changes)
    async with client.stream("POST", "/v1/completions", json=request) as answer:
        assert answer.status_code == 200, (await answer.aread()).decode()
        async for line in answer.aiter_lines():
            match line.removeprefix("data: "):
                case "":
                    continue
                case "[DONE]":
                    return
                case event:
                    told = json.loads(event)
                    assert "error" not in told, told
                    for choice in told["choices"]:
                        yield choice
    raise AssertionError("the stream ended without [DONE]")


async def leave_after(
    client: httpx.AsyncClient, prompt: str | Sequence[int], num_tokens: int, *, tokens_before: int
) -> int:
    """Ask for `num_tokens` and close the connection after `tokens_before` have come; the number that did come."""
    seen = 0
    events = stream(client, prompt, num_tokens)
    try:
        async for choice in events:
            seen += len(choice["token_ids"] or ())
            if seen >= tokens_before:
                break
    finally:
        await events.aclose()  # type: ignore[attr-defined]  # it is a generator
    return seen


async def leave_at_once(client: httpx.AsyncClient, prompt: str | Sequence[int], *, after_s: float) -> bool:
    """Ask for one token and close the connection `after_s` later; whether that was before the answer."""
    try:
        await client.post("/v1/completions", json=body(prompt, 1), timeout=httpx.Timeout(60, read=after_s))
    except httpx.ReadTimeout:
        return True
    return False


def _logprobs(choice: dict[str, Any]) -> tuple[float, ...]:
    return tuple((choice.get("logprobs") or {}).get("token_logprobs") or ())
