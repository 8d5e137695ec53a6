"""The admin port: metrics, probes, the state stream. NetworkPolicy keeps clients away from it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from flowprefill.server.http import http_exception
from flowprefill.server.lifecycle import Lifecycle
from flowprefill.server.state import StateHub

log = logging.getLogger(__name__)

MAX_STATE_STREAMS = 64


def admin_app(
    *,
    lifecycle: Lifecycle,
    registry: CollectorRegistry,
    states: StateHub,
    before_scrape: Callable[[], None] = lambda: None,
    history: Callable[[], dict[str, object]] = dict,
) -> FastAPI:
    """`/metrics`, `/health` (live), `/ready` (loaded and warmed), `/v1/state` (newline-delimited `PodState`),
    `/v1/history` (the last tasks and preemptions)."""
    num_streams = 0

    async def metrics(request: Request) -> Response:
        before_scrape()
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encoder(registry), headers={"content-type": content_type})

    async def health(request: Request) -> Response:
        if lifecycle.failure is not None:
            return JSONResponse({"status": "failed", "reason": lifecycle.failure}, status_code=503)
        return JSONResponse({"status": "ok", "phase": lifecycle.phase})

    async def ready(request: Request) -> Response:
        body = {"ready": lifecycle.ready, "phase": lifecycle.phase}
        return JSONResponse(body, status_code=200 if lifecycle.ready else 503)

    async def state(request: Request) -> Response:
        if num_streams >= MAX_STATE_STREAMS:
            return JSONResponse({"status": "too many state streams"}, status_code=429)
        return StreamingResponse(counted(states.lines()), media_type="application/x-ndjson")

    async def past(request: Request) -> Response:
        return JSONResponse(history())

    async def counted(lines: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        nonlocal num_streams
        num_streams += 1
        try:
            async for line in lines:
                yield line
        finally:
            num_streams -= 1

    routes = [
        Route("/metrics", metrics, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/v1/state", state, methods=["GET"]),
        Route("/v1/history", past, methods=["GET"]),
    ]
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, routes=list(routes))
    app.add_exception_handler(HTTPException, http_exception)
    return app
