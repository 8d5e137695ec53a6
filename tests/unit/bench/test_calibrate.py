"""Probes of the service under measurement."""

from __future__ import annotations

import json

import httpx
import pytest

from flowprefill.bench.calibrate import Prober
from flowprefill.errors import FlowPrefillError
from support.pods import WordTokenizer


async def test_no_probe_begins_like_one_before_whoever_sent_it() -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content)["messages"][0]["content"])
        events = [{"choices": [{"delta": {"content": "yes"}}]}, {"choices": [], "usage": USAGE}]
        return httpx.Response(200, text="".join(f"data: {json.dumps(event)}\n\n" for event in events))

    async with httpx.AsyncClient(base_url="http://pod", transport=httpx.MockTransport(answer)) as client:
        for prober in (Prober(client, "m", WordTokenizer()) for _ in range(2)):
            for _ in range(3):
                record = await prober.send(64, max_tokens=1, slo_class="chat")
                assert record.num_prompt_tokens == 70
    assert len({text[:6] for text in seen}) == len(seen) == 6


USAGE = {"prompt_tokens": 70, "completion_tokens": 1}


async def test_a_probe_that_fails_says_so() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(503, json={"error": {"message": "no pod"}})

    async with httpx.AsyncClient(base_url="http://pod", transport=httpx.MockTransport(refuse)) as client:
        with pytest.raises(FlowPrefillError, match=r"a probe of 64 tokens failed: .*HTTP 503"):
            await Prober(client, "m", WordTokenizer()).send(64, max_tokens=1, slo_class="chat")
