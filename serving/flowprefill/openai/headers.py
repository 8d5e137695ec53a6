"""Headers that both servers and the proxy handle: request ids, and what must not cross a hop."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

REQUEST_ID_HEADER = "x-request-id"

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""RFC 9110 7.6.1: these belong to one connection."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def request_id_from(value: str | None) -> str:
    """The client's request id when it is 1 to 128 harmless characters, else a fresh one."""
    if value is not None and _REQUEST_ID.fullmatch(value):
        return value
    return uuid.uuid4().hex


def end_to_end(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Headers that may be forwarded: no hop-by-hop ones, none that `Connection` names; order kept."""
    listed = [(name, value) for name, value in headers]
    named = {
        token.strip().lower()
        for name, value in listed
        if name.lower() == "connection"
        for token in value.split(",")
    }
    return [(name, value) for name, value in listed if name.lower() not in HOP_BY_HOP | named]
