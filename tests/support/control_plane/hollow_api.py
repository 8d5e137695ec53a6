"""A small asynchronous client of an API server: requests, and watches that never lose an object."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Literal

import aiohttp

from support.control_plane.plane import ControlPlane

Json = dict[str, Any]
Change = Literal["ADDED", "MODIFIED", "DELETED"]

PAGE = 500
CONNECTIONS = 16
REQUEST_S = 30.0
WATCH_S = 300
AGAIN_S = 0.5
"""Pause after an API server that does not answer."""

STRATEGIC = "application/strategic-merge-patch+json"
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"  # JSON is YAML


class Refused(Exception):
    """The API server answered with an error."""

    def __init__(self, status: int, method: str, path: str, body: str) -> None:
        super().__init__(f"{method} {path}: {status} {body[:500]}")
        self.status = status


class Api:
    """The API server of a control plane as its admin. Used on one event loop; closed with `async with`."""

    def __init__(self, plane: ControlPlane, *, user_agent: str) -> None:
        self._plane = plane
        self._headers = {"authorization": "Bearer admin-token", "user-agent": user_agent}

    async def __aenter__(self) -> Api:
        trust = ssl.create_default_context(cafile=str(self._plane.pki.ca))
        self._http = aiohttp.ClientSession(
            base_url=self._plane.url,
            headers=self._headers,
            connector=aiohttp.TCPConnector(ssl=trust, limit=CONNECTIONS),
            timeout=aiohttp.ClientTimeout(total=REQUEST_S),
        )
        # Each watch occupies a connection for as long as it lasts.
        self._watching = aiohttp.ClientSession(
            base_url=self._plane.url,
            headers=self._headers,
            connector=aiohttp.TCPConnector(ssl=trust),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=WATCH_S + 30),
            read_bufsize=1 << 20,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()
        await self._watching.close()

    async def request(
        self,
        method: str,
        path: str,
        body: object | None = None,
        *,
        content_type: str = "application/json",
        params: Mapping[str, str] | None = None,
    ) -> Json:
        """One request; the answer's JSON. Raises `Refused`, `aiohttp.ClientError` or `TimeoutError`."""
        async with self._http.request(
            method,
            path,
            params=params,
            data=None if body is None else json.dumps(body),
            headers={"content-type": content_type},
        ) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise Refused(answer.status, method, path, text)
            found: Json = json.loads(text)
            return found

    async def follow(self, path: str, **selectors: str) -> AsyncIterator[tuple[Change, Json]]:
        """Every object below `path` as it is and as it changes, for ever.

        Goes through API servers that end watches, restart or are away: the list is then read again, what is still
        there is told as MODIFIED and what has gone meanwhile as DELETED.
        """
        known: dict[str, Json] = {}
        while True:
            try:
                version = ""
                async for changes, listed in self._list(path, selectors, known):
                    version = listed
                    for change in changes:
                        yield change
                async for kind, item in self._watch(path, selectors, version):
                    uid = item["metadata"]["uid"]
                    if kind == "DELETED":
                        known.pop(uid, None)
                    else:
                        known[uid] = item
                    yield kind, item
            except (Refused, aiohttp.ClientError, TimeoutError, OSError):
                await asyncio.sleep(AGAIN_S)

    async def _list(
        self, path: str, selectors: Mapping[str, str], known: dict[str, Json]
    ) -> AsyncIterator[tuple[list[tuple[Change, Json]], str]]:
        seen: set[str] = set()
        params = {**selectors, "limit": str(PAGE)}
        while True:
            page = await self.request("GET", path, params=params)
            changes: list[tuple[Change, Json]] = []
            for item in page["items"]:
                uid = item["metadata"]["uid"]
                seen.add(uid)
                changes.append(("MODIFIED" if uid in known else "ADDED", item))
                known[uid] = item
            token = page["metadata"].get("continue")
            if not token:
                changes += [("DELETED", known.pop(uid)) for uid in list(known) if uid not in seen]
            yield changes, page["metadata"]["resourceVersion"]
            if not token:
                return
            params["continue"] = token

    async def _watch(
        self, path: str, selectors: Mapping[str, str], version: str
    ) -> AsyncIterator[tuple[Change, Json]]:
        while True:
            params = {
                **selectors,
                "watch": "1",
                "allowWatchBookmarks": "true",
                "resourceVersion": version,
                "timeoutSeconds": str(WATCH_S),
            }
            async with self._watching.get(path, params=params) as answer:
                if answer.status >= 400:
                    raise Refused(answer.status, "WATCH", path, await answer.text())
                async for line in _lines(answer.content):
                    event = json.loads(line)
                    kind, item = event["type"], event["object"]
                    if kind == "ERROR":
                        raise Refused(int(item.get("code", 500)), "WATCH", path, str(item.get("message")))
                    version = item["metadata"]["resourceVersion"]
                    if kind != "BOOKMARK":
                        yield kind, item


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length; `StreamReader.readline` refuses long ones."""
    rest = b""
    async for chunk in stream.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line:
                yield line
