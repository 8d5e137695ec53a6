"""A reverse proxy in front of an API server: sees every request of the operator, and breaks what a case wants broken.

It speaks plain HTTP towards the operator and HTTPS towards the API server, with the caller's own credentials. Watches
pass through as they come. All of it runs on one thread with an event loop; the methods are called from the test's.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from types import TracebackType

import aiohttp
from aiohttp import web
from anyio.from_thread import start_blocking_portal

from flowprefill_operator.node.ports import free_ports
from support.control_plane.fault_calls import Call, Calls, Refusal, call_of
from support.control_plane.plane import ControlPlane

PASSED_ON = ("accept", "authorization", "content-type", "user-agent", "accept-encoding")


class _Watch:
    """An open watch. When silent, what comes from the API server is thrown away."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.silent = False


class FaultyApiServer:
    """An API server that can be broken. Start and stop it with `with`."""

    def __init__(self, plane: ControlPlane) -> None:
        (self._port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self._port}"
        self.calls = Calls()
        self._plane = plane
        self._refusals: tuple[Refusal, ...] = ()
        self._watches: set[_Watch] = set()
        self._running = ExitStack()

    def __enter__(self) -> FaultyApiServer:
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal(name="faulty API server"))
            stack.enter_context(self._portal.wrap_async_context_manager(self._live()))
            self._running = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()

    def refuse(
        self, status: int, *, verb: str | None = None, resource: str | None = None, name: str | None = None
    ) -> Refusal:
        """Answer requests of that verb, resource (such as `deployments.apps`) and name with `status`; None is any.

        Open watches that match end, so that they come back and are refused.
        """
        refusal = Refusal(status=status, verb=verb, resource=resource, name=name)
        self._refusals = (*self._refusals, refusal)
        self._portal.call(self._cut, refusal.matches)
        return refusal

    def heal(self, refusal: Refusal | None = None) -> None:
        """Take one refusal back, or all."""
        self._refusals = () if refusal is None else tuple(r for r in self._refusals if r is not refusal)

    def silence_watches(self, resource: str | None = None) -> int:
        """Let the open watches (of a resource) go silent: they stay open, nothing comes any more. How many."""

        def silence() -> int:
            found = [w for w in self._watches if resource in (None, w.call.resource)]
            for watch in found:
                watch.silent = True
            return len(found)

        return self._portal.call(silence)

    def num_watches(self, resource: str | None = None) -> int:
        """Open watches that are not silent."""
        return self._portal.call(
            lambda: sum(resource in (None, w.call.resource) and not w.silent for w in self._watches)
        )

    def go_down(self) -> None:
        """Cut every connection and refuse new ones."""
        self._portal.call(self._close)

    def come_back(self) -> None:
        """Listen again, at the same address."""
        self._portal.call(self._listen)

    # What follows runs on the proxy's thread.

    @asynccontextmanager
    async def _live(self) -> AsyncIterator[None]:
        self._transports: dict[_Watch, asyncio.Transport] = {}
        trust = ssl.create_default_context(cafile=str(self._plane.pki.ca))
        async with aiohttp.ClientSession(
            base_url=self._plane.url,
            connector=aiohttp.TCPConnector(ssl=trust, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        ) as self._upstream:
            self._server = web.Server(self._handle, access_log=None)
            await self._listen()
            yield
            await self._close()

    async def _listen(self) -> None:
        self._listening = await asyncio.get_running_loop().create_server(
            self._server, "127.0.0.1", self._port, reuse_address=True
        )

    async def _close(self) -> None:
        self._listening.close()
        for connection in list(self._server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0)

    def _cut(self, matches: Callable[[Call], bool]) -> None:
        for watch, transport in list(self._transports.items()):
            if matches(watch.call):
                transport.abort()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        call = call_of(request.method, request.path, request.query, request.headers.get("user-agent", ""))
        index, hook = self.calls.arrived(call)
        if hook is not None and hook.when == "before":
            hook.action()
            return self._no_answer(request)
        for refusal in self._refusals:
            if refusal.matches(call):
                self.calls.answered(index, refusal.status)
                return _refused(call, refusal.status)
        body = await request.read()
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        try:
            async with self._upstream.request(
                request.method, request.rel_url, data=body or None, headers=headers
            ) as answer:
                self.calls.answered(index, answer.status)
                if call.verb == "watch" and answer.status == 200:
                    return await self._pass_watch(request, call, answer)
                data = await answer.read()
        except aiohttp.ClientError:
            return self._no_answer(request)
        if hook is not None:
            hook.action()
            return self._no_answer(request)
        return web.Response(status=answer.status, body=data, headers=_headers(answer))

    async def _pass_watch(
        self, request: web.BaseRequest, call: Call, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        passed = web.StreamResponse(status=answer.status, headers=_headers(answer))
        await passed.prepare(request)
        watch = _Watch(call)
        self._watches.add(watch)
        if request.transport is not None:
            self._transports[watch] = request.transport
        try:
            async for chunk in answer.content.iter_any():
                if not watch.silent:
                    await passed.write(chunk)
            if watch.silent:
                # A connection that nobody closes: it lasts until the caller gives up or the proxy ends.
                await asyncio.Event().wait()
        except ConnectionError:
            pass
        finally:
            self._watches.discard(watch)
            self._transports.pop(watch, None)
        return passed

    @staticmethod
    def _no_answer(request: web.BaseRequest) -> web.StreamResponse:
        """Cut the connection."""
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=502)


def _headers(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {
        name: answer.headers[name] for name in ("content-type", "content-encoding") if name in answer.headers
    }


def _refused(call: Call, status: int) -> web.Response:
    """The error that an API server answers with."""
    reason = {403: "Forbidden", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}
    said = f'{call.resource} "{call.name or ""}" is forbidden' if status == 403 else f"refused with {status}"
    message = f'{said}: User "test" cannot {call.verb} resource "{call.resource}"'
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "reason": reason.get(status, "Unknown"),
        "code": status,
    }
    return web.json_response(body, status=status, headers={"retry-after": "1"} if status == 429 else None)
