"""Optional API keys: a file of keys, read again when it changes, and the middleware that asks for one.

The file has one key a line; empty lines and lines that start with `#` do not count. Only digests are kept and
compared, in constant time, so neither timing nor a memory dump of this object tells a key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Callable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from flowprefill.errors import InvalidConfiguration, Unauthorized
from flowprefill.hosting.watching import WatchedFile
from flowprefill.openai.errors import answer_for

log = logging.getLogger(__name__)

MAX_KEYS = 10_000
RECHECK_S = 1.0


class KeyFile:
    """The keys in `path`. A change is seen within `RECHECK_S`; an unreadable or empty file keeps the last good keys.

    Raises `InvalidConfiguration` when the file holds no key at first.
    """

    def __init__(self, path: Path, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._file = WatchedFile(path)
        self._now_s = now_s
        self._checked_s = now_s()
        self._digests = _read_digests(self._file)

    def accepts(self, key: str) -> bool:
        """Whether `key` is one of the keys. Compares with all of them, whichever matches."""
        self._reload()
        presented = _digest(key)
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, presented)
        return found

    def one(self) -> str:
        """The first key, read from the file now and kept nowhere. Raises `InvalidConfiguration`."""
        return _read_keys(self._file)[0]

    def _reload(self) -> None:
        now_s = self._now_s()
        if now_s - self._checked_s < RECHECK_S:
            return
        self._checked_s = now_s
        if not self._file.changed():
            return
        try:
            self._digests = _read_digests(self._file)
        except InvalidConfiguration as error:
            log.warning("API keys not reloaded", extra={"path": str(self._file.path), "reason": str(error)})
        else:
            log.info("API keys reloaded", extra={"path": str(self._file.path), "keys": len(self._digests)})


class ApiKeyMiddleware:
    """Asks for `Authorization: Bearer KEY` on every path of the app it wraps; 401 in OpenAI's envelope otherwise."""

    def __init__(self, app: ASGIApp, *, keys: KeyFile) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            presented = Headers(scope=scope).get("authorization", "")
            scheme, _, key = presented.partition(" ")
            if scheme.lower() != "bearer" or not self._keys.accepts(key.strip()):
                await _refuse(send, missing=not presented)
                return
        await self._app(scope, receive, send)


async def _refuse(send: Send, *, missing: bool) -> None:
    reason = "no API key came with the request" if missing else "the API key is not known"
    answer = answer_for(Unauthorized(f"{reason}; accepted is a header 'Authorization: Bearer KEY'"))
    headers = {"content-type": "application/json", **answer.headers}
    body = answer.body()
    await send(
        {
            "type": "http.response.start",
            "status": answer.status,
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()]
            + [(b"content-length", str(len(body)).encode())],
        }
    )
    await send({"type": "http.response.body", "body": body})


def read_keys(path: Path) -> list[str]:
    """The keys in `path`, for who has to hand them on. Raises `InvalidConfiguration`."""
    return _read_keys(WatchedFile(path))


def _read_digests(file: WatchedFile) -> tuple[bytes, ...]:
    return tuple(_digest(key) for key in _read_keys(file))


def _read_keys(file: WatchedFile) -> list[str]:
    try:
        lines = file.read().splitlines()
    except InvalidConfiguration as error:
        raise InvalidConfiguration(f"API keys: {error}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not 1 <= len(keys) <= MAX_KEYS:
        raise InvalidConfiguration(
            f"API key file {file.path} holds {len(keys)} keys; accepted are 1 to {MAX_KEYS}"
        )
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
