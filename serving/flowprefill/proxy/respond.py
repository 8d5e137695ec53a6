"""Writes one answer to the client, and keeps the record's status in step with what was really sent."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import Send

from flowprefill.errors import QueueFull, Unavailable
from flowprefill.openai.errors import answer_for
from flowprefill.openai.sse import encode
from flowprefill.proxy.record import Record
from flowprefill.proxy.upstream import PodRefused

log = logging.getLogger(__name__)

HEADER_DROPPED = "x-llm-d-request-dropped-reason"
REJECTED_SATURATED = "rejected-saturated"
REJECTED_NO_ENDPOINTS = "rejected-no-endpoints"


class ClientLeft(Exception):
    """Nobody reads the answer any more."""


@dataclass(slots=True)
class Answer:
    """One HTTP answer. `debug`: the client asked for headers that tell what the proxy decided."""

    send: Send
    record: Record
    debug: bool = False
    started: bool = False
    ended: bool = False

    async def start(self, status: int, headers: Mapping[str, str], ttft_s: float | None = None) -> None:
        """Send the head. `ttft_s` is told in a header when the client asked for it."""
        told = dict(headers)
        slo = self.record.slo
        if self.debug and slo is not None:
            told["x-flowprefill-slo-class"] = slo.slo_class.name
            told["x-flowprefill-slo-ttft-ms"] = f"{1000 * slo.ttft_s:.0f}"
            if ttft_s is not None:
                told["x-flowprefill-ttft-ms"] = f"{1000 * ttft_s:.1f}"
        self.started = True
        self.record.status = status
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in told.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def finish(self, body: bytes = b"") -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": body})

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """A short answer that is known as a whole."""
        await self.start(status, {**headers, "content-length": str(len(body))})
        await self.finish(body)

    async def pass_on(self, refused: PodRefused) -> None:
        """A pod's own 4xx goes to the client as it is. Before anything was sent only."""
        headers = dict(refused.headers)
        if refused.status == 429:
            headers.setdefault("retry-after", "1")
            headers.setdefault(HEADER_DROPPED, REJECTED_SATURATED)
        await self._last(self.whole(refused.status, headers, refused.body))

    async def fail(self, error: Exception) -> None:
        """Tell the client that the request failed: as the answer, or as the stream's last event."""
        answer = answer_for(error)
        if self.started:
            self.record.broken = True
            if not self.ended:
                await self._last(self.finish(encode(answer.envelope())))
            return
        headers = {"content-type": "application/json", **answer.headers}
        if isinstance(error, QueueFull):
            headers[HEADER_DROPPED] = REJECTED_SATURATED
        elif isinstance(error, Unavailable):
            headers[HEADER_DROPPED] = REJECTED_NO_ENDPOINTS
        await self._last(self.whole(answer.status, headers, answer.body()))

    async def _send(self, message: dict[str, object]) -> None:
        try:
            await self.send(message)
        except OSError as error:
            raise ClientLeft from error

    async def _last(self, sending: object) -> None:
        """The last thing said on this answer: a client that is gone does not hear it."""
        try:
            await sending  # type: ignore[misc]  # one of the coroutines above
        except ClientLeft:
            log.debug("client left before its error", extra={"request_id": self.record.request_id})
