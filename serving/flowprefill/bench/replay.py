"""Open-loop replay of a load against an OpenAI-compatible endpoint, measured as its clients see it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence

import httpx

from flowprefill.bench.load import LoadItem
from flowprefill.bench.report import RequestRecord

REQUEST_TIMEOUT_S = 120.0


async def send(
    client: httpx.AsyncClient, model: str, item: LoadItem, *, slo_s: float, started_s: float, request_id: str
) -> RequestRecord:
    """Send one request now and read its stream to the end. Errors become a record, never an exception."""
    sent_s = time.monotonic()
    first_s: float | None = None
    error: str | None = None
    pieces: list[str] = []
    prompt_tokens, cached, completion = item.target_tokens, 0, 0
    body = {
        "model": model,
        "messages": [{"role": "user", "content": item.prompt}],
        "max_tokens": item.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"x-flowprefill-slo-class": item.slo_class, "x-request-id": request_id}
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                raise RuntimeError(f"HTTP {response.status_code}: {(await response.aread()).decode()[:200]}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(str(chunk["error"].get("message")))
                content = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                if content and first_s is None:
                    first_s = time.monotonic()
                pieces.append(content)
                if usage := chunk.get("usage"):
                    prompt_tokens, completion = usage["prompt_tokens"], usage["completion_tokens"]
                    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    except (httpx.HTTPError, RuntimeError, ValueError, KeyError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return RequestRecord(
        request_id=request_id,
        slo_class=item.slo_class,
        at_s=sent_s - started_s,
        num_prompt_tokens=prompt_tokens,
        num_cached_tokens=cached,
        num_output_tokens=completion,
        ttft_slo_s=slo_s,
        ttft_s=None if first_s is None else first_s - sent_s,
        end_s=time.monotonic() - started_s,
        error=error if error else (None if first_s is not None else "no content token came"),
        text="".join(pieces),
    )


async def replay(
    base_url: str,
    model: str,
    items: Sequence[LoadItem],
    *,
    ttft_slo_s: dict[str, float],
    run: str = "replay",
    on_record: Callable[[RequestRecord], None] = lambda record: None,
) -> tuple[RequestRecord, ...]:
    """Send every item at its time, late or not, and return a record each, in order of sending."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=base_url, timeout=REQUEST_TIMEOUT_S, limits=limits) as client:
        started_s = time.monotonic()

        async def one(number: int, item: LoadItem) -> RequestRecord:
            await asyncio.sleep(max(item.at_s - (time.monotonic() - started_s), 0.0))
            record = await send(
                client,
                model,
                item,
                slo_s=ttft_slo_s[item.slo_class],
                started_s=started_s,
                request_id=f"{run}-{number}",
            )
            on_record(record)
            return record

        return tuple(await asyncio.gather(*(one(number, item) for number, item in enumerate(items))))
