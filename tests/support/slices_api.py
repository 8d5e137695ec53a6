"""The EndpointSlice part of an API server, in the test's event loop: list, watch, and every way to fail them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kubernetes.aio.client import ApiClient, Configuration
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from flowprefill.proxy.kubernetes_api import SliceApi
from support.proxy_pods import serving
from support.slices import NAMESPACE, SERVICE

Stored = dict[str, Any]


@dataclass
class FakeSlicesApi:
    """Stores slices and tells watchers. `refuse` answers instead of lists and watches while it is set.

    `requests` are the queries that came; `quiet` lets watches hang without a word, also past their time.
    """

    slices: dict[str, Stored] = field(default_factory=dict)
    version: int = 100
    oldest: int = 0
    refuse: Callable[[Request], Response | None] = lambda request: None
    quiet: bool = False
    requests: list[dict[str, str]] = field(default_factory=list)
    _log: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _cut: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, stored: Stored) -> None:
        name = stored["metadata"]["name"]
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.slices[name] = self._stamped(stored)
        self.send(kind, self.slices[name])

    def delete(self, name: str) -> None:
        self.send("DELETED", self._stamped(self.slices.pop(name)))

    def publish(self, slices: list[Stored]) -> None:
        """Make these the slices there are."""
        names = {each["metadata"]["name"] for each in slices}
        for gone in set(self.slices) - names:
            self.delete(gone)
        for each in slices:
            self.put(each)

    def bookmark(self) -> None:
        self.version += 1
        body = {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1"}
        self.send("BOOKMARK", {**body, "metadata": {"resourceVersion": str(self.version)}})

    def send(self, kind: str, stored: dict[str, Any]) -> None:
        self._log.append((self.version, {"type": kind, "object": stored}))
        self._wake()

    def forget_history(self) -> None:
        """Watches from before now get 410."""
        self.oldest = self.version
        self._log.clear()

    def cut_watches(self) -> None:
        """End every watch in the middle of its answer."""
        self._cut.set()
        self._cut = asyncio.Event()

    def _stamped(self, stored: Stored) -> Stored:
        self.version += 1
        return {**stored, "metadata": {**stored["metadata"], "resourceVersion": str(self.version)}}

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def app(self) -> Starlette:
        path = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
        return Starlette(routes=[Route(path, self._answer)])

    async def _answer(self, request: Request) -> Response:
        self.requests.append(dict(request.query_params))
        refusal = self.refuse(request)
        if refusal is not None:
            return refusal
        assert (
            request.query_params["labelSelector"] == f"flowprefill.io/service={SERVICE},flowprefill.io/role"
        )
        if request.query_params.get("watch") not in ("true", "True"):
            listing = {"kind": "EndpointSliceList", "metadata": {"resourceVersion": str(self.version)}}
            return JSONResponse({**listing, "items": list(self.slices.values()) or None})
        start = int(request.query_params["resourceVersion"])
        seconds = float(request.query_params["timeoutSeconds"])
        return StreamingResponse(self._watch(start, seconds, self._cut), media_type="application/json")

    async def _watch(self, start: int, seconds: float, cut: asyncio.Event) -> AsyncIterator[bytes]:
        if start < self.oldest:
            status = {
                "kind": "Status",
                "code": 410,
                "reason": "Expired",
                "message": "too old resource version",
            }
            yield line({"type": "ERROR", "object": status})
            return
        sent = start
        end_s = asyncio.get_running_loop().time() + seconds
        while (left_s := end_s - asyncio.get_running_loop().time()) > 0 or self.quiet:
            changed = self._changed
            for version, event in [] if self.quiet else list(self._log):
                if version > sent:
                    sent = version
                    yield line(event)
            waiting = [asyncio.ensure_future(changed.wait()), asyncio.ensure_future(cut.wait())]
            try:
                limit_s = None if self.quiet else left_s
                await asyncio.wait(waiting, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in waiting:
                    each.cancel()
            if cut.is_set():
                raise ConnectionAbortedError("cut on purpose")


def line(event: dict[str, Any]) -> bytes:
    return json.dumps(event).encode() + b"\n"


def status(code: int, message: str = "no") -> Callable[[Request], Response]:
    """Refuses with a Status, as API servers do."""
    body = {"kind": "Status", "status": "Failure", "code": code, "message": message}
    return lambda request: JSONResponse(body, status_code=code)


@asynccontextmanager
async def slices_client(
    address: str, *, watch_s: tuple[int, int] = (30, 30), grace_s: float = 15.0
) -> AsyncIterator[SliceApi]:
    async with ApiClient(Configuration(host=f"http://{address}")) as client:
        yield SliceApi(client, namespace=NAMESPACE, service=SERVICE, watch_s=watch_s, grace_s=grace_s)


@asynccontextmanager
async def fake_slices(**limits: Any) -> AsyncIterator[tuple[FakeSlicesApi, SliceApi]]:
    """A fake API server and a client of it."""
    fake = FakeSlicesApi()
    async with serving(fake.app()) as address, slices_client(address, **limits) as client:
        yield fake, client
        fake.cut_watches()
