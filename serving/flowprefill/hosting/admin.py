"""The admin port's common part: metrics and probes. NetworkPolicy keeps clients away from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from flowprefill.hosting.lifecycle import Lifecycle
from flowprefill.hosting.responses import not_served


@dataclass(frozen=True, slots=True, kw_only=True)
class InUse:
    """What a process runs with; `generation` is that of the live document in use."""

    role: str
    revision: str
    generation: Callable[[], int]


def admin_app(
    routes: Sequence[BaseRoute],
    *,
    in_use: InUse,
    lifecycle: Lifecycle,
    registry: CollectorRegistry,
    before_scrape: Callable[[], None],
) -> FastAPI:
    """`/metrics`, `/health` (live), `/ready`, `/v1/config`, and a role's own `routes`."""

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

    async def config(request: Request) -> Response:
        return JSONResponse(
            {"role": in_use.role, "revision": in_use.revision, "generation": in_use.generation()}
        )

    common = [
        Route("/metrics", metrics, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/v1/config", config, methods=["GET"]),
    ]
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, routes=[*common, *routes])
    app.add_exception_handler(HTTPException, not_served)
    return app
