"""A pod's own paths on the admin port: the state stream and the recent past."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from flowprefill.server.state import StateHub

MAX_STATE_STREAMS = 64


def admin_routes(*, states: StateHub, history: Callable[[], dict[str, object]] = dict) -> list[BaseRoute]:
    """`/v1/state` (newline-delimited `PodState`) and `/v1/history` (the last tasks and preemptions)."""
    num_streams = 0

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

    return [Route("/v1/state", state, methods=["GET"]), Route("/v1/history", past, methods=["GET"])]
