"""The app of a pod's API port: everything a handler raises becomes an answer, and every answer is counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flowprefill.errors import FlowPrefillError, QueueFull
from flowprefill.hosting.auth import ApiKeyMiddleware, KeyFile
from flowprefill.hosting.lifecycle import Lifecycle
from flowprefill.hosting.responses import error_response, not_served
from flowprefill.hosting.scope import RequestScope
from flowprefill.metrics.engine import PodMetrics
from flowprefill.openai.errors import answer_for
from flowprefill.server.client import ClientLeft

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left; only logs and metrics see it."""


def api_app(
    routes: Sequence[BaseRoute],
    *,
    lifecycle: Lifecycle,
    metrics: PodMetrics,
    keys: KeyFile | None = None,
    max_in_flight: int = 8192,
    logs_requests: Callable[[], bool] = lambda: False,
) -> FastAPI:
    """The app of an API port. Everything a handler raises becomes an answer here."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, routes=list(routes))
    app.add_exception_handler(HTTPException, not_served)
    if keys is not None:
        app.add_middleware(ApiKeyMiddleware, keys=keys)
    app.add_middleware(
        AnswersErrors,
        lifecycle=lifecycle,
        metrics=metrics,
        max_in_flight=max_in_flight,
        logs_requests=logs_requests,
    )
    app.add_middleware(RequestScope, lifecycle=lifecycle)
    return app


class AnswersErrors:
    """Bounds the requests in flight, answers what handlers raise, counts and logs how each request ended."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        lifecycle: Lifecycle,
        metrics: PodMetrics,
        max_in_flight: int,
        logs_requests: Callable[[], bool],
    ) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._max_in_flight = max_in_flight
        self._logs_requests = logs_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope["state"]["request_id"]
        began_s = time.monotonic()
        status = 0

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if self._lifecycle.in_flight > self._max_in_flight:  # this one is counted already
                raise QueueFull(f"{self._max_in_flight} requests are in this pod, which is the most accepted")
            await self._app(scope, receive, send_noted)
        except (ClientLeft, ClientDisconnect):
            status = CLIENT_CLOSED_REQUEST
        except Exception as error:  # the top of a request
            if status:
                log.exception("a request failed after its answer began", extra={"request_id": request_id})
            else:
                await self._answer(error, scope, receive, send_noted, request_id)
        finally:
            self._metrics.answered(status or CLIENT_CLOSED_REQUEST)
            level = logging.INFO if self._logs_requests() else logging.DEBUG
            if log.isEnabledFor(level):
                fields = {
                    "request_id": request_id,
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "seconds": round(time.monotonic() - began_s, 6),
                }
                log.log(level, "request", extra=fields)

    async def _answer(
        self, error: Exception, scope: Scope, receive: Receive, send: Send, request_id: str
    ) -> None:
        if isinstance(error, FlowPrefillError):
            log.debug("request refused", extra={"request_id": request_id, "reason": str(error)})
        else:
            log.exception("a handler failed", extra={"request_id": request_id})
        try:
            await error_response(answer_for(error))(scope, receive, send)
        except Exception as lost:
            log.debug("an error answer was not sent", extra={"request_id": request_id, "reason": repr(lost)})
