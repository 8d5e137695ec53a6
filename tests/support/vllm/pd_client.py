"""A client of prefill/decode pairs as vLLM's own example proxies are: two HTTP requests, and what the first answers goes with the second."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import httpx

from support.vllm.completions import body

ASK_FOR_KV: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


async def prefill_leg(
    client: httpx.AsyncClient, prompt: Sequence[int], request_id: str = "", **changes: Any
) -> dict[str, Any]:
    """The first request: one token, KV kept. Its answer's `kv_transfer_params`, empty when there are none."""
    request = body(prompt, 1, stream=False, kv_transfer_params=ASK_FOR_KV, **changes)
    answer = await client.post("/v1/completions", json=request, headers=_headers(request_id))
    assert answer.status_code == 200, answer.text
    return answer.json().get("kv_transfer_params") or {}


async def decode_leg(
    client: httpx.AsyncClient,
    prompt: Sequence[int],
    num_tokens: int,
    kv_params: dict[str, Any],
    request_id: str = "",
    **changes: Any,
) -> tuple[int, ...]:
    """The second request, with what the first one answered; the answer's token ids."""
    request = body(prompt, num_tokens, **changes)
    if kv_params:
        request["kv_transfer_params"] = kv_params
    answer = await client.post("/v1/completions", json=request, headers=_headers(request_id))
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return tuple(choice["token_ids"])


async def both_legs(
    prefill: httpx.AsyncClient,
    decode: httpx.AsyncClient,
    prompt: Sequence[int],
    num_tokens: int,
    **changes: Any,
) -> tuple[int, ...]:
    """A whole answer; `changes` are fields of the first request alone."""
    request_id = uuid.uuid4().hex
    kv_params = await prefill_leg(prefill, prompt, request_id, **changes)
    return await decode_leg(decode, prompt, num_tokens, kv_params, request_id)


def _headers(request_id: str) -> dict[str, str]:
    return {"x-request-id": request_id or uuid.uuid4().hex}
