"""Server-sent events, both ways: what a stream of chunks looks like on the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping

from flowprefill.errors import UpstreamFailed

DONE = b"data: [DONE]\n\n"
DONE_DATA = "[DONE]"

STREAM_HEADERS: Mapping[str, str] = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx otherwise holds tokens back
}

MAX_EVENT_BYTES = 4 * 2**20


def encode(payload: Mapping[str, object]) -> bytes:
    """One event whose data is `payload` as JSON on one line."""
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventDecoder:
    """Bytes of a stream in, data of whole events out, whatever the chunk borders.

    Comments and fields other than `data` are dropped; several data lines of one event are joined by a line
    feed, as the standard says. Raises `UpstreamFailed` when one event exceeds `max_event_bytes`.
    """

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._tail = b""
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, chunk: bytes) -> list[str]:
        """Data of the events that `chunk` completes, in order."""
        events: list[str] = []
        lines = (self._tail + chunk).split(b"\n")
        self._tail = lines.pop()
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data).decode("utf-8", errors="replace"))
                    self._data, self._data_bytes = [], 0
            elif line.startswith(b"data:"):
                value = line[5:].removeprefix(b" ")
                self._data.append(value)
                self._data_bytes += len(value)
            self._check(self._data_bytes)
        self._check(self._data_bytes + len(self._tail))
        return events

    def _check(self, size: int) -> None:
        if size > self._max_event_bytes:
            raise UpstreamFailed(
                f"a streamed event has more than {self._max_event_bytes} bytes, which is the most accepted"
            )
