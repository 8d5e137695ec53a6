"""The admin port of a pod as the operator asks it, with answers that a test decides on."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


class AdminPort:
    """Answers `GET /v1/config`, `GET /v1/attainment` and `POST /v1/round-trip`; `asked` counts requests by path.

    An answer is a mapping, bytes as they are, a status, a URL to go to instead, or None for a request that is never answered.
    """

    def __init__(self) -> None:
        self.config: Any = {"role": "prefill", "revision": "rev", "generation": 1}
        self.attainment: Any = {"classes": {}}
        self.round_trip: Any = {"revision": "rev", "ok": True, "seconds": 0.1}
        self.asked: Counter[str] = Counter()
        self.bodies: list[Any] = []
        self._over = asyncio.Event()
        app = web.Application()
        app.router.add_route("*", "/v1/{what}", self._answer)
        self._server = TestServer(app)

    @property
    def address(self) -> str:
        return f"{self._server.host}:{self._server.port}"

    async def __aenter__(self) -> AdminPort:
        await self._server.start_server()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._over.set()
        await self._server.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked[request.path] += 1
        if request.can_read_body:
            self.bodies.append(await request.json())
        match request.path:
            case "/v1/config":
                said = self.config
            case "/v1/attainment":
                said = self.attainment
            case _:
                said = self.round_trip
        match said:
            case None:
                await self._over.wait()
                return web.Response(status=500)
            case str():
                raise web.HTTPTemporaryRedirect(said)
            case int():
                return web.Response(status=said, text="no")
            case bytes():
                return web.Response(body=said)
        ok = said.get("ok", True)
        return web.Response(status=200 if ok else 503, text=json.dumps(said))


def window(met: int, missed: int) -> dict[str, Any]:
    """One class of an answer about attainment."""
    return {"windows": {"1h": {"met": met, "missed": missed}, "5m": {"met": 1000, "missed": 1000}}}
