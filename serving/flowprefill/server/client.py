"""The client at the other end: work that ends when it leaves, streams that notice at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from flowprefill.openai.errors import answer_for
from flowprefill.openai.sse import STREAM_HEADERS, encode

log = logging.getLogger(__name__)

T = TypeVar("T")


class ClientLeft(Exception):
    """The client closed its connection before the answer was complete. Nobody reads an answer any more."""


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and awaited, when the client leaves first (`ClientLeft`).

    The request's body has been read. Cancelling the caller cancels `work` as well.
    """
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        left.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and (error := task.exception()) is not None:
                log.debug("work ended in an error after its client left", extra={"reason": repr(error)})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from a generator whose first event exists already.

    The generator is closed when the client leaves, even while it waits. An error after the first byte becomes
    an event in OpenAI's envelope, and the stream ends without `[DONE]`.
    """

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes, None], *, headers: Mapping[str, str] = {}
    ) -> None:
        super().__init__(status_code=200, headers={**STREAM_HEADERS, **headers})
        if "content-length" in self.headers:
            del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_client_leaves(receive, self._send(send))
        finally:
            await self._rest.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for event in self._rest:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:  # the top of this answer: the client must hear of it in band
            log.warning("a stream ended in an error", extra={"reason": f"{type(error).__name__}: {error}"})
            body = encode(answer_for(error).envelope())
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def event_stream(
    events: AsyncGenerator[bytes, None], *, headers: Mapping[str, str] = {}
) -> EventStream:
    """A streaming response, once the first event is there: errors before it still choose the status."""
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, headers=headers)
