"""An HTTP server in the place of an API server: notes requests, answers what a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import Configuration

from flowprefill_operator.cluster.client import Cluster
from flowprefill_operator.cluster.connect import Credentials, connected


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    content_type: str
    authorization: str
    body: Any


Answer = tuple[int, Any]
"""HTTP status, and a body: a value to be sent as JSON, or bytes as they are."""


@dataclass(slots=True)
class SmallApi:
    """`answer` is called with each request; None leaves it unanswered."""

    answer: Callable[[Request], Answer | None] = lambda request: (200, {})
    requests: list[Request] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.Response:
        text = await request.text()
        seen = Request(
            request.method,
            request.path,
            dict(request.query),
            request.headers.get("content-type", ""),
            request.headers.get("authorization", ""),
            json.loads(text) if text else None,
        )
        self.requests.append(seen)
        answer = self.answer(seen)
        if answer is None:
            await self.over.wait()
            return web.Response(status=500)
        status, body = answer
        if isinstance(body, bytes):
            return web.Response(status=status, body=body)
        return web.json_response(body, status=status)


@asynccontextmanager
async def small_api() -> AsyncIterator[tuple[SmallApi, Cluster]]:
    """The server, and a client of it with a token."""
    api = SmallApi()
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", api.handle)
    server = TestServer(app)
    await server.start_server()
    configuration = Configuration(host=f"http://{server.host}:{server.port}")
    configuration.api_key["BearerToken"] = "Bearer secret"
    try:
        async with connected(Credentials(configuration=configuration, namespace=None)) as (cluster, _):
            yield api, cluster
    finally:
        api.over.set()
        await server.close()
