"""The admin port: metrics, probes, attainment for the operator. NetworkPolicy keeps clients away from it."""

from __future__ import annotations

import json
from collections.abc import Callable

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flowprefill.proxy.app import not_served
from flowprefill.proxy.lifecycle import Lifecycle


def admin_app(
    *,
    lifecycle: Lifecycle,
    registry: CollectorRegistry,
    before_scrape: Callable[[], None],
    attainment: Callable[[], dict[str, object]],
) -> FastAPI:
    """`/metrics`, `/health` (live), `/ready` (configured and listening; pods do not matter), `/v1/attainment`."""

    async def metrics(request: Request) -> Response:
        before_scrape()
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encoder(registry), headers={"content-type": content_type})

    async def health(request: Request) -> Response:
        return _json({"status": "ok", "phase": lifecycle.phase})

    async def ready(request: Request) -> Response:
        body = {"ready": lifecycle.ready, "phase": lifecycle.phase}
        return _json(body, status_code=200 if lifecycle.ready else 503)

    async def report(request: Request) -> Response:
        return _json(attainment())

    routes = [
        Route("/metrics", metrics, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/v1/attainment", report, methods=["GET"]),
    ]
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, routes=list(routes))
    app.add_exception_handler(HTTPException, not_served)
    return app


def _json(body: object, status_code: int = 200) -> Response:
    return Response(json.dumps(body), status_code=status_code, media_type="application/json")
