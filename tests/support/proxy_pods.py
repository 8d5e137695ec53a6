"""Pods for proxy tests: small ASGI apps that obey the prefill/decode protocol and misbehave on request.

They run on real sockets in the test's own event loop. Tokens are words of the prompt, counted by whitespace; a
prefilled prompt's KV is held until it is pulled, given back, or the test ends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from flowprefill.wire import Endpoint, PodState

HOST = "127.0.0.1"
MAX_MODEL_LEN = 4096


class QuietServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self):
        yield


@asynccontextmanager
async def serving(app: Any, port: int = 0) -> AsyncIterator[str]:
    """Serve an ASGI app; yields `host:port`. Connections that are still open at the end are cut."""
    listening = socket.create_server((HOST, port))
    server = QuietServer(
        uvicorn.Config(app, log_config=None, lifespan="off", access_log=False, timeout_graceful_shutdown=1)
    )
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await until(lambda: server.started)
        yield "{}:{}".format(*listening.getsockname()[:2])
    finally:
        task.cancel()  # uvicorn's own end takes up to two tenths of a second
        await asyncio.gather(task, return_exceptions=True)
        for listener in server.servers:
            listener.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        for running in list(server.server_state.tasks):
            running.cancel()
        listening.close()


async def until(condition: Callable[[], object], what: str = "") -> None:
    """Wait for a condition; a test's own time-out is the bound."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # any condition, not only one that announces itself
            await asyncio.sleep(0.002)


@dataclass
class Seen:
    """One request as a pod got it."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    cancelled: bool = False
    finished: bool = False

    @property
    def request_id(self) -> str:
        return self.headers["x-request-id"]


@dataclass
class FakePod:
    """What all fake pods share. `gate` set means that requests pass; `fail` maps the n-th request to an answer."""

    name: str
    role: str
    revision: str = "r1"
    seen: list[Seen] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    fail: dict[int, Callable[[], Response]] = field(default_factory=dict)
    state: PodState | None = None
    state_clients: int = 0
    address: str = ""

    def __post_init__(self) -> None:
        self.gate.set()
        self._state_changed = asyncio.Event()
        self._sequence = itertools.count(1)

    @property
    def running(self) -> list[Seen]:
        return [seen for seen in self.seen if not seen.finished and not seen.cancelled]

    def endpoint(self, **changes: Any) -> Endpoint:
        return Endpoint(
            name=self.name,
            role=self.role,
            revision=self.revision,
            address=self.address,
            admin=self.address,
        ).model_copy(update=changes)

    def report(self, **fields: Any) -> None:
        """Send a state line; without one the pod has no state stream, as stock vLLM."""
        defaults = {
            "sequence": next(self._sequence),
            "role": self.role,
            "revision": self.revision,
            "ready": True,
        }
        self.state = PodState(**{**defaults, **fields})
        self._state_changed.set()
        self._state_changed = asyncio.Event()

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self._generate, methods=["POST"]),
                Route("/v1/chat/completions", self._generate, methods=["POST"]),
                Route("/v1/kv/{request_id:path}", self._release, methods=["DELETE"]),
                Route("/v1/state", self._stream_state),
            ]
        )

    async def _stream_state(self, request: Request) -> Response:
        if self.state is None:
            return JSONResponse({"error": {"message": "not found"}}, status_code=404)

        async def lines() -> AsyncIterator[str]:
            self.state_clients += 1
            try:
                while self.state is not None:
                    changed = self._state_changed
                    yield self.state.model_dump_json() + "\n"
                    try:
                        async with asyncio.timeout(1.0):
                            await changed.wait()
                    except TimeoutError:
                        continue
            finally:
                self.state_clients -= 1

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def _release(self, request: Request) -> Response:
        return Response(status_code=404)

    async def _generate(self, request: Request) -> Response:
        body = json.loads(await request.body())
        seen = Seen(path=request.url.path, body=body, headers=dict(request.headers))
        self.seen.append(seen)
        made = self.fail.get(len(self.seen))
        if made is not None:
            seen.finished = True
            return made()
        work = asyncio.create_task(self._answer(request, seen))
        gone = asyncio.create_task(self._disconnected(request))
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not work.done():
            work.cancel()
            seen.cancelled = True
            return Response(status_code=499)
        return work.result()

    @staticmethod
    async def _disconnected(request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    async def _answer(self, request: Request, seen: Seen) -> Response:
        raise NotImplementedError


@dataclass
class FakePrefill(FakePod):
    """Answers one token and keeps the prompt's KV."""

    role: str = "prefill"
    held: dict[str, list[str]] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)

    async def _answer(self, request: Request, seen: Seen) -> Response:
        await self.gate.wait()
        body = seen.body
        assert body["stream"] is False, "a prefill leg is not streamed"
        assert body["max_tokens"] == 1, "a prefill leg makes one token"
        assert body["n"] == 1
        assert "stream_options" not in body
        assert body["kv_transfer_params"]["do_remote_decode"] is True
        words = words_of(body)
        seen.finished = True
        if len(words) + body["vllm_xargs"].get("decode_max_tokens", 1) > MAX_MODEL_LEN:
            return refusal("context_length_exceeded")
        self.held[seen.request_id] = words
        return JSONResponse(
            {
                "id": "p",
                "object": "text_completion",
                "choices": [{"index": 0, "text": words[0], "finish_reason": "length"}],
                "usage": {
                    "prompt_tokens": len(words),
                    "completion_tokens": 1,
                    "total_tokens": len(words) + 1,
                },
                "kv_transfer_params": {
                    "do_remote_prefill": True,
                    "remote_request_id": seen.request_id,
                    "remote_host": HOST,
                    "from": self.name,
                },
            }
        )

    async def _release(self, request: Request) -> Response:
        request_id = request.path_params["request_id"]
        self.released.append(request_id)
        self.held.pop(request_id, None)
        return Response(status_code=204)


@dataclass
class FakeDecode(FakePod):
    """Pulls the KV and streams the prompt's words back, `max_tokens` of them, for each of `n` choices.

    `token_gate` holds every token after the first `free_tokens`; `break_after` cuts the stream after so many.
    """

    role: str = "decode"
    sources: list[FakePrefill] = field(default_factory=list)
    pulled: int = 0
    token_gate: asyncio.Event = field(default_factory=asyncio.Event)
    free_tokens: int = 0
    break_after: int | None = None
    pull: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.token_gate.set()

    async def _answer(self, request: Request, seen: Seen) -> Response:
        await self.gate.wait()
        body = seen.body
        assert body["stream"] is True, "decode is always streamed"
        words = self._words(body)
        if words is None:
            seen.finished = True
            error = {
                "message": "KV is gone",
                "type": "upstream_error",
                "param": None,
                "code": "kv_transfer_failed",
            }
            return JSONResponse({"error": error}, status_code=502)
        return StreamingResponse(self._chunks(seen, words), media_type="text/event-stream")

    def _words(self, body: dict[str, Any]) -> list[str] | None:
        params = body["kv_transfer_params"]
        assert params["do_remote_prefill"] is True
        source = next((pod for pod in self.sources if pod.name == params.get("from")), None)
        if source is None:
            return None
        assert source.revision == self.revision, "legs of different revisions"
        words = source.held.pop(params["remote_request_id"], None)
        if words is not None:
            self.pulled += len(words)
        return words

    async def _chunks(self, seen: Seen, words: list[str]) -> AsyncIterator[bytes]:
        body, chat = seen.body, seen.path.endswith("chat/completions")
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        head = {"id": f"id-{seen.request_id}", "created": 1, "model": body["model"]}
        head["object"] = "chat.completion.chunk" if chat else "text_completion"
        n = body.get("n") or 1
        usage = bool((body.get("stream_options") or {}).get("include_usage"))
        try:
            if chat:
                for index in range(n):
                    yield event(head, [{"index": index, "delta": {"role": "assistant", "content": ""}}])
            for position in range(limit):
                if position >= self.free_tokens:
                    await self.token_gate.wait()
                if position == self.break_after:
                    raise ConnectionAbortedError("broken on purpose")
                for index in range(n):
                    word = words[position % len(words)] + " "
                    last = "length" if position == limit - 1 else None
                    choice = {"index": index, "finish_reason": last, "logprobs": None}
                    choice |= {"delta": {"content": word}} if chat else {"text": word}
                    yield event(head, [choice])
                await asyncio.sleep(0)
            if usage:
                total = {"prompt_tokens": len(words), "completion_tokens": limit * n}
                total["total_tokens"] = sum(total.values())
                yield event(head, [], usage=total)
            yield b"data: [DONE]\n\n"
            seen.finished = True
        finally:
            seen.cancelled = not seen.finished


@dataclass
class FakeColocated(FakeDecode):
    """One pod that does both."""

    role: str = "colocated"

    def _words(self, body: dict[str, Any]) -> list[str] | None:
        assert "kv_transfer_params" not in body
        return words_of(body)


def refusal(code: str, status: int = 400) -> Response:
    """A 4xx in OpenAI's envelope."""
    error = {"message": "no", "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status_code=status)


def event(head: dict[str, Any], choices: list[Any], **more: Any) -> bytes:
    return b"data: " + json.dumps({**head, "choices": choices, **more}).encode() + b"\n\n"


def words_of(body: dict[str, Any]) -> list[str]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return prompt.split() or [""]
    if isinstance(prompt, list):
        assert len({type(item) for item in prompt}) == 1
        assert isinstance(prompt[0], int) or len(prompt) == 1, "several prompts reached a pod"
        return [str(item) for item in prompt]
    return " ".join(str(message["content"]) for message in body["messages"]).split()
