"""Discovery in a cluster: lists, then watches, for ever. An API server that is away changes nothing for requests.

list ─▶ watch ─▶ (the server ends it) ─▶ watch from the last version ─▶ ...
 ▲       │
 └───────┴── anything fails: the last endpoints stay, a pause, then from the start
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

from kubernetes.aio.client import ApiClient

from flowprefill.errors import reason_of
from flowprefill.proxy.kubernetes_api import (
    Bookmark,
    Expired,
    Opened,
    Removed,
    SliceApi,
    SlicesUnavailable,
    Stored,
    api_configuration,
)
from flowprefill.proxy.slices import Slice, endpoints_of
from flowprefill.wire import Endpoint

log = logging.getLogger(__name__)

PAUSE_S = 0.5
"""The pause after a first failure; doubled by every one that follows, up to the longest."""
LONGEST_PAUSE_S = 10.0
SHORTEST_WATCH_S = 1.0
"""Watches begin at least this far apart, whatever ends them."""


class Counts(Protocol):
    """What is counted of discovery."""

    def discovery_failed(self, trouble: str) -> None: ...

    def discovery_up(self, up: bool) -> None: ...


class KubernetesDiscovery:
    """The endpoints in the EndpointSlices of one service (a `Discovery`)."""

    def __init__(self, slices: SliceApi, *, counts: Counts, longest_pause_s: float = LONGEST_PAUSE_S) -> None:
        self._slices = slices
        self._counts = counts
        self._longest_pause_s = longest_pause_s
        self._failures = 0
        self._trouble: str | None = None

    async def watch(self) -> AsyncIterator[tuple[Endpoint, ...]]:
        """As `Discovery.watch`; the first report is empty when the API server does not answer."""
        reported: tuple[Endpoint, ...] | None = None
        while True:
            try:
                async with aclosing(self._followed()) as states:
                    async for slices in states:
                        endpoints = endpoints_of(slices.values())
                        if endpoints != reported:
                            reported = endpoints
                            yield endpoints
            except Expired as error:
                log.debug("listing again", extra={"reason": str(error)})
                pause_s = SHORTEST_WATCH_S
            except SlicesUnavailable as error:
                pause_s = self._failed(error)
            except Exception as error:  # the top of discovery, which nothing ends
                log.exception("discovery failed unexpectedly")
                pause_s = self._failed(SlicesUnavailable("unexpected", reason_of(error)))
            if reported is None:
                reported = ()
                yield ()
            await asyncio.sleep(pause_s)

    async def _followed(self) -> AsyncGenerator[dict[str, Slice], None]:
        """All slices by name, now and after every change. Ends by `Expired` or `SlicesUnavailable` alone."""
        listing = await self._slices.list()
        version = listing.resource_version
        slices = {each.metadata.name: each for each in listing.slices}
        yield slices
        while True:
            began_s = time.monotonic()
            async with aclosing(self._slices.watch(version)) as events:  # type: ignore[type-var]  # a generator
                async for event in events:
                    match event:
                        case Opened():
                            self._counts.discovery_up(True)
                            continue
                        case Stored():
                            slices[event.slice.metadata.name] = event.slice
                        case Removed():
                            slices.pop(event.name, None)
                        case Bookmark():
                            pass
                    version = event.resource_version
                    self._well()
                    yield slices
            self._well()
            await asyncio.sleep(max(began_s + SHORTEST_WATCH_S - time.monotonic(), 0.0))

    def _well(self) -> None:
        """A watch brought something, or ended as it should."""
        self._failures = 0
        if self._trouble is not None:
            self._trouble = None
            log.info("pods are discovered again")

    def _failed(self, error: SlicesUnavailable) -> float:
        """Tell it, once until a watch went well or the kind of trouble is another; returns the next pause in seconds."""
        self._counts.discovery_failed(error.trouble)
        self._counts.discovery_up(False)
        if self._trouble != error.trouble:
            self._trouble = error.trouble
            log.warning(
                "pods are not discovered; the last endpoints stay",
                extra={"trouble": error.trouble, "reason": str(error)},
            )
        self._failures += 1
        return min(PAUSE_S * 2.0 ** min(self._failures - 1, 16), self._longest_pause_s)


@asynccontextmanager
async def kubernetes_discovery(
    *, namespace: str, service: str, counts: Counts
) -> AsyncIterator[KubernetesDiscovery]:
    """Discovery with this process's credentials. Raises `InvalidConfiguration` when it has none."""
    async with ApiClient(await api_configuration()) as api:
        yield KubernetesDiscovery(SliceApi(api, namespace=namespace, service=service), counts=counts)
