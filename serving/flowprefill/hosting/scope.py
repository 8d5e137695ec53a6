"""One request from its first byte to its last, on every API port."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flowprefill.hosting.lifecycle import Lifecycle
from flowprefill.openai.headers import REQUEST_ID_HEADER, request_id_from


class RequestScope:
    """Gives every request its id (`state["request_id"]`, echoed in the answer), counts it while it runs, and closes
    connections while the server stops."""

    def __init__(self, app: ASGIApp, *, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_from(Headers(scope=scope).get(REQUEST_ID_HEADER))
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = request_id
                if self._lifecycle.closes_connections:
                    headers["connection"] = "close"
            await send(message)

        self._lifecycle.request_began()
        try:
            await self._app(scope, receive, send_stamped)
        finally:
            self._lifecycle.request_ended()
