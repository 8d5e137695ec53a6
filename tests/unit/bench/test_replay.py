from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from flowprefill.bench.load import LoadItem
from flowprefill.bench.replay import replay


def item(prompt: str, at_s: float = 0.0) -> LoadItem:
    return LoadItem(
        at_s=at_s, slo_class="chat", prompt=prompt, target_tokens=5, shared_tokens=0, max_tokens=4
    )


async def chat(request: Request) -> Response:
    body = await request.json()
    prompt = body["messages"][0]["content"]
    if prompt == "refuse":
        return JSONResponse({"error": {"message": "busy"}}, status_code=429)

    async def events() -> AsyncIterator[str]:
        def chunk(content: str | None, **more: object) -> str:
            delta = {"role": "assistant"} if content is None else {"content": content}
            return f"data: {json.dumps({'choices': [{'delta': delta}], **more})}\n\n"

        yield chunk(None)
        if prompt == "break":
            yield f"data: {json.dumps({'error': {'message': 'the pod died'}})}\n\n"
            return
        if prompt != "silent":
            yield chunk("a")
            yield chunk("b")
        usage = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


@pytest.fixture
async def url() -> AsyncIterator[str]:
    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    running = asyncio.create_task(server.serve(sockets=[listening]))
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    await running


async def test_every_request_becomes_one_record_in_order_whatever_happens(url: str) -> None:
    prompts = ["answer", "refuse", "break", "silent"]
    records = await replay(url, "m", [item(prompt) for prompt in prompts], ttft_slo_s={"chat": 30.0})
    answer, refuse, broken, silent = records
    assert (answer.text, answer.num_prompt_tokens, answer.num_cached_tokens, answer.num_output_tokens) == (
        "ab",
        7,
        3,
        2,
    )
    assert answer.met
    assert answer.error is None
    assert refuse.error is not None
    assert "HTTP 429" in refuse.error
    assert broken.error is not None
    assert "the pod died" in broken.error
    assert silent.error == "no content token came"
    assert not any(record.met for record in (refuse, broken, silent))


async def test_a_dead_server_is_an_error_in_the_record() -> None:
    (record,) = await replay("http://127.0.0.1:9", "m", [item("answer")], ttft_slo_s={"chat": 1.0})
    assert record.error is not None
    assert not record.met
