"""The API port: OpenAI's paths, the list of models, liveness. Everything else is a clean 404 or 405."""

from __future__ import annotations

import json
import time

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from flowprefill.errors import NotFound
from flowprefill.hosting.auth import ApiKeyMiddleware, KeyFile
from flowprefill.hosting.lifecycle import Lifecycle
from flowprefill.hosting.responses import error_response, not_served
from flowprefill.hosting.scope import RequestScope
from flowprefill.openai.errors import answer_for
from flowprefill.openai.responses import model_card, models_list
from flowprefill.proxy.answering import Answerer
from flowprefill.proxy.settings import ProxySettings

OPEN_PATHS = frozenset({"/health"})
"""Paths that ask for no API key: probes have none."""


def api_app(
    *,
    settings: ProxySettings,
    lifecycle: Lifecycle,
    completions: Answerer,
    chat: Answerer,
    keys: KeyFile | None,
) -> FastAPI:
    """The app of the API port."""
    created = int(time.time())
    name, limit = settings.served_name, settings.max_model_len

    async def models(request: Request) -> Response:
        return _json(models_list([name], created=created, max_model_len=limit))

    async def model(request: Request) -> Response:
        asked = request.path_params["model"]
        if asked != name:
            return error_response(
                answer_for(NotFound(f"the model {asked[:100]!r} is not served; served is {name!r}"))
            )
        return _json(model_card(name, created=created, max_model_len=limit))

    async def health(request: Request) -> Response:
        return _json({"status": "ok"})

    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{model:path}", model, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
    ]
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, routes=list(routes))
    app.add_exception_handler(HTTPException, not_served)
    if keys is not None:
        app.add_middleware(KeysExceptOpenPaths, keys=keys)
    app.add_middleware(RequestScope, lifecycle=lifecycle)
    return app


class KeysExceptOpenPaths:
    """Asks for an API key everywhere but on `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, *, keys: KeyFile) -> None:
        self._open = app
        self._keyed = ApiKeyMiddleware(app, keys=keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._open if scope.get("path") in OPEN_PATHS else self._keyed
        await app(scope, receive, send)


def _json(body: object) -> Response:
    return Response(json.dumps(body, separators=(",", ":")), media_type="application/json")
