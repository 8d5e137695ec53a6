"""HTTP to pods: one leg is one request on one connection; leaving a leg closes its connection.

A pod notices the closed connection and frees the request's work, so cancelling a task here is all it takes to
cancel a leg there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from flowprefill.errors import FlowPrefillError, UpstreamFailed, reason_of
from flowprefill.openai.headers import end_to_end
from flowprefill.openai.sse import EventDecoder
from flowprefill.wire import KV_RELEASE_PATH, Endpoint

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 16 * 2**20
BIG_BODY_BYTES = 1 << 18
"""Above this much text, JSON is written in a thread, so that one long prompt does not hold everybody up."""

PASSED_HEADERS = frozenset({"content-type", "retry-after", "x-llm-d-request-dropped-reason"})
MAX_RELEASES = 256
RELEASE_TIMEOUT_S = 5.0


class LegFailed(UpstreamFailed):
    """A leg died. `accepted` is False when the pod certainly did not start on it (no connection, or 503).

    `lost` says that the connection died before the answer began, and most likely the pod with it: another one may well
    answer the request.
    """

    def __init__(self, message: str, *, pod: str, accepted: bool, lost: bool = False) -> None:
        super().__init__(message)
        self.pod = pod
        self.accepted = accepted
        self.lost = lost


class PodRefused(FlowPrefillError):
    """A pod answered 4xx: its answer goes to the client as it is, and nothing is tried again."""

    def __init__(self, status: int, body: bytes, headers: list[tuple[str, str]]) -> None:
        super().__init__(f"a pod answered {status}")
        self.status = status
        self.body = body
        self.headers = headers


KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A node that is gone says nothing. A connection to it counts as dead after 25 s; a pod that computes keeps it."""


def new_client(*, max_connections: int, connect_timeout_s: float) -> httpx.AsyncClient:
    """A client for legs: no environment proxies, no redirects, no limit on how long a pod that is there may compute."""
    limits = httpx.Limits(
        max_connections=max_connections, max_keepalive_connections=512, keepalive_expiry=15.0
    )
    return httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(
            limits=limits, trust_env=False, socket_options=list(_socket_options())
        ),
        timeout=httpx.Timeout(None, connect=connect_timeout_s, pool=connect_timeout_s),
        trust_env=False,
        follow_redirects=False,
    )


def _socket_options() -> Iterator[tuple[int, int, int]]:
    yield socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # not every system has all of them
            yield socket.IPPROTO_TCP, getattr(socket, name), value


@asynccontextmanager
async def open_leg(
    http: httpx.AsyncClient,
    endpoint: Endpoint,
    path: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
) -> AsyncIterator[httpx.Response]:
    """POST a leg; inside the block its answer (2xx) may be read. Raises PodRefused and LegFailed."""
    request = http.build_request(
        "POST", f"http://{endpoint.address}{path}", content=await _encode(body), headers=dict(headers)
    )
    try:
        response = await http.send(request, stream=True)
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        raise LegFailed(
            f"no connection to {endpoint.name}: {reason_of(error)}", pod=endpoint.name, accepted=False
        ) from error
    except httpx.HTTPError as error:
        raise LegFailed(
            f"{endpoint.name} gave no answer: {reason_of(error)}",
            pod=endpoint.name,
            accepted=True,
            lost=True,
        ) from error
    try:
        if not response.is_success:
            raise await _refusal(endpoint, response)
        yield response
    finally:
        await response.aclose()


async def read_json(endpoint: Endpoint, response: httpx.Response) -> dict[str, Any]:
    """The whole answer of a leg as a JSON object. Raises LegFailed."""
    raw = await _read(endpoint, response)
    try:
        value = json.loads(raw)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise LegFailed(
            f"{endpoint.name} answered {raw[:100]!r}; expected is a JSON object",
            pod=endpoint.name,
            accepted=True,
        )
    return value


async def read_events(endpoint: Endpoint, response: httpx.Response) -> AsyncIterator[list[str]]:
    """Data of the events of a streamed leg, as many at a time as arrived together. Raises LegFailed."""
    decoder = EventDecoder()
    begun = False
    try:
        async for chunk in response.aiter_bytes():
            events = decoder.feed(chunk)
            if events:
                begun = True
                yield events
    except httpx.HTTPError as error:
        raise LegFailed(
            f"{endpoint.name} broke off: {reason_of(error)}",
            pod=endpoint.name,
            accepted=True,
            lost=not begun,
        ) from error


class KVReleases:
    """Tells prefill pods that nobody will pull a finished prompt's KV. Best effort: a lease ends it anyway."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, endpoint: Endpoint, remote_request_id: str, headers: Mapping[str, str]) -> bool:
        """Send it in the background; False when too many are under way already."""
        if len(self._tasks) >= MAX_RELEASES:
            return False
        task = asyncio.get_running_loop().create_task(
            self._release(endpoint, remote_request_id, dict(headers))
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def close(self) -> None:
        """Wait for those under way; each is bounded by its time-out."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _release(self, endpoint: Endpoint, remote_request_id: str, headers: dict[str, str]) -> None:
        path = KV_RELEASE_PATH.format(remote_request_id=remote_request_id)
        try:
            response = await self._http.delete(
                f"http://{endpoint.address}{path}", headers=headers, timeout=RELEASE_TIMEOUT_S
            )
        except httpx.HTTPError as error:
            log.debug("KV not released", extra={"pod": endpoint.name, "error": repr(error)})
        else:
            log.debug(
                "KV released",
                extra={"pod": endpoint.name, "request_id": remote_request_id, "status": response.status_code},
            )


async def _refusal(endpoint: Endpoint, response: httpx.Response) -> FlowPrefillError:
    status = response.status_code
    body = await _read(endpoint, response)
    if 400 <= status < 500:
        kept = [(k, v) for k, v in end_to_end(response.headers.multi_items()) if k.lower() in PASSED_HEADERS]
        return PodRefused(status, body, kept)
    return LegFailed(
        f"{endpoint.name} answered {status}: {body[:200].decode(errors='replace')}",
        pod=endpoint.name,
        accepted=status != httpx.codes.SERVICE_UNAVAILABLE,
    )


async def _read(endpoint: Endpoint, response: httpx.Response) -> bytes:
    parts, size = [], 0
    try:
        async for chunk in response.aiter_bytes():
            size += len(chunk)
            if size > MAX_ANSWER_BYTES:
                raise LegFailed(
                    f"{endpoint.name} answered more than {MAX_ANSWER_BYTES} bytes",
                    pod=endpoint.name,
                    accepted=True,
                )
            parts.append(chunk)
    except httpx.HTTPError as error:
        raise LegFailed(
            f"{endpoint.name} broke off: {reason_of(error)}", pod=endpoint.name, accepted=True, lost=True
        ) from error
    return b"".join(parts)


async def _encode(body: Mapping[str, Any]) -> bytes:
    def dump() -> bytes:
        return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")

    return await asyncio.to_thread(dump) if _is_big(body) else dump()


def _is_big(body: Mapping[str, Any]) -> bool:
    prompt = body.get("prompt")
    if isinstance(prompt, str | list):
        return len(prompt) > BIG_BODY_BYTES // (1 if isinstance(prompt, str) else 8)
    messages = body.get("messages")
    if not isinstance(messages, list):
        return False
    return sum(len(str(m.get("content"))) for m in messages if isinstance(m, dict)) > BIG_BODY_BYTES
