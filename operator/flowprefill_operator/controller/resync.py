"""A look at everything, again and again: what watches have missed, which APIs there are, what is forbidden."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from flowprefill_crd.crd import HASH_ANNOTATION
from flowprefill_crd.schema_hash import SCHEMA_HASH
from flowprefill_operator.apply import Applier
from flowprefill_operator.cluster.client import Cluster
from flowprefill_operator.cluster.errors import ClusterError, Forbidden, NotFound, Unavailable
from flowprefill_operator.controller.metrics import OperatorMetrics
from flowprefill_operator.controller.mounts import Mounts
from flowprefill_operator.controller.queue import WorkQueue
from flowprefill_operator.controller.services import Services
from flowprefill_operator.controller.surroundings import CRD_MISSING, Surroundings
from flowprefill_operator.kinds import OWNED, SERVICES, WATCHED, Kind
from flowprefill_operator.observe.store import Store

log = logging.getLogger(__name__)

SELECTOR = "app.kubernetes.io/managed-by=flowprefill-operator,flowprefill.io/service"
"""What the operator's own objects and their pods carry. Every list and watch is narrowed to it by the server."""

FIRST_RETRY_S = 1.0
INSTALL_RETRY_S = 5.0
"""Between two looks while the CRD is not installed: whoever installs it waits for the operator to be ready."""

UNTOLD_S = 10.0
"""Age of a service of which no watch has told, from which on the watch is taken for broken."""

WATCHES_AT_ONCE = 32


@dataclass(slots=True, kw_only=True)
class Resync:
    """The loop. `beat_s` is when it last went round, on the monotonic clock."""

    cluster: Cluster
    services: Services
    store: Store
    applier: Applier
    mounts: Mounts
    queue: WorkQueue
    surroundings: Surroundings
    metrics: OperatorMetrics
    namespaces: tuple[str, ...]
    every_s: float
    appeared: Callable[[], None]
    """Called when watches have to begin anew: an API is there that was not, or one is watched in vain."""
    soon: asyncio.Event = field(default_factory=asyncio.Event)
    """Set it for a look at once: something has happened to the watches."""
    beat_s: float = field(default_factory=time.monotonic)
    _problem: str | None = None
    """Why the last look was not complete."""

    async def run(self) -> None:
        """Look, and look again, until cancelled. The first look is repeated soon until it succeeds."""
        while True:
            self.beat_s = time.monotonic()
            try:
                await self.look()
                self.metrics.resyncs.labels("ok").inc()
                self._problem = None
            except ClusterError as error:
                self.metrics.resyncs.labels("error").inc()
                known, self._problem = self._problem, str(error)
                level = logging.DEBUG if known == self._problem else logging.WARNING
                log.log(level, "resync not complete", extra={"reason": self._problem})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self.soon.wait()
            self.soon.clear()

    def _pause_s(self) -> float:
        if not self.surroundings.synced:
            return FIRST_RETRY_S
        return self.every_s if self.surroundings.installed else min(self.every_s, INSTALL_RETRY_S)

    async def look(self) -> None:
        """Look at everything once. What may not be read is noted, and the rest is read all the same."""
        await self._look_at_crd()
        for kind in OWNED:
            if kind.optional:
                await self._look_for(kind)
        first = not self.surroundings.synced
        kinds = [kind for kind in (SERVICES, *WATCHED) if self.surroundings.serves(kind)]
        places = [(kind, namespace) for kind in kinds for namespace in self.namespaces or (None,)]
        versions: dict[tuple[Kind, str | None], str] = {}
        for kind, namespace in places:
            news, version = await self._list(kind, namespace)
            if news and not first:
                self.metrics.missed.inc(news)
            if version is not None:
                versions[kind, namespace] = version
        self.surroundings.looked.set()
        await self._try_watches(versions)
        known = self.store.uids()
        self.applier.keep_only(known)
        self.mounts.keep_only(known)
        self.queue.keep_only(set(self.services))
        self._count()
        for key in self.services:
            self.queue.add(key)

    async def _list(self, kind: Kind, namespace: str | None) -> tuple[int, str | None]:
        """How much of what there is was news, and the version of the list; None when there is none to be had."""
        try:
            items, version = await self.cluster.list(kind, namespace=namespace, labels=_selector(kind))
        except Forbidden as error:
            self.surroundings.deny("list", kind)
            log.warning("kind cannot be listed", extra={"resource": kind.resource, "reason": error.message})
            return 0, None
        except NotFound:
            if kind == SERVICES:
                self._installed(False)
            return 0, None
        except Unavailable as error:
            if not kind.optional:
                raise
            # Another project's API that is broken keeps nothing from being served but what it is for.
            log.warning("kind cannot be listed", extra={"resource": kind.resource, "reason": error.message})
            return 0, None
        self.surroundings.allow("list", kind)
        if kind == SERVICES:
            if self.surroundings.synced and self.surroundings.installed and self._untold(items):
                log.warning("a service is known by a look alone; watches begin anew")
                self.appeared()
            self._installed(True)
            for gone in self.services.replace(items, version, namespace):
                self.queue.add(gone)
            return 0, version
        return self.store.replace(kind, items, version, namespace=namespace), version

    def _untold(self, items: Iterable[Mapping[str, Any]]) -> bool:
        """Whether there is a service that a watch should have told of by now."""
        oldest = datetime.now(UTC) - timedelta(seconds=UNTOLD_S)
        return any(
            self.services.get((meta["namespace"], meta["name"])) is None
            and datetime.fromisoformat(meta["creationTimestamp"]) < oldest
            for meta in (item["metadata"] for item in items)
        )

    def _installed(self, there: bool) -> None:
        if self.surroundings.installed and not there:
            log.warning(CRD_MISSING)
        elif there and not self.surroundings.installed:
            log.info("the CustomResourceDefinition of FlowPrefillServices is installed")
            self.appeared()
        self.surroundings.installed = there

    async def _try_watches(self, versions: Mapping[tuple[Kind, str | None], str]) -> None:
        """Find out which kinds may be watched: a watch that is refused for ever is only a line in kopf's log."""
        places = asyncio.Semaphore(WATCHES_AT_ONCE)

        async def allowed(kind: Kind, namespace: str | None, since: str) -> bool:
            try:
                async with places:
                    await self.cluster.try_watch(
                        kind, namespace=namespace, labels=_selector(kind), since=since
                    )
            except Forbidden:
                return False
            except ClusterError:
                return True
            return True

        found = await asyncio.gather(*(allowed(*at, since) for at, since in versions.items()))
        refused = {kind for (kind, _), fine in zip(versions, found, strict=True) if not fine}
        for kind in {kind for kind, _ in versions}:
            (self.surroundings.deny if kind in refused else self.surroundings.allow)("watch", kind)

    async def _look_for(self, kind: Kind) -> None:
        served = await self.cluster.serves(kind)
        if served == self.surroundings.serves(kind) and self.surroundings.synced:
            return
        (self.surroundings.absent.discard if served else self.surroundings.absent.add)(kind)
        if self.surroundings.synced:
            log.info("API appeared" if served else "API is gone", extra={"resource": kind.resource})
            if served:
                self.appeared()

    async def _look_at_crd(self) -> None:
        try:
            crd = await self.cluster.crd()
        except Forbidden:
            return  # a namespaced operator may not read it
        if crd is None:
            return  # the list of services will tell
        found = (crd["metadata"].get("annotations") or {}).get(HASH_ANNOTATION)
        outdated = found != SCHEMA_HASH
        if outdated and not self.surroundings.schema_outdated:
            log.warning(
                "the cluster's CRD is of another release", extra={"seen": found, "accepted": SCHEMA_HASH}
            )
        self.surroundings.schema_outdated = outdated

    def _count(self) -> None:
        ready = Counter(_ready(self.services.get(key) or {}) for key in self.services)
        for status in ("True", "False", "Unknown"):
            self.metrics.services.labels(status).set(ready[status])


def _selector(kind: Kind) -> str | None:
    return None if kind == SERVICES else SELECTOR


def _ready(body: object) -> str:
    status = body.get("status") if isinstance(body, dict) else None
    for condition in (status or {}).get("conditions", ()):
        if condition.get("type") == "Ready":
            return str(condition.get("status", "Unknown"))
    return "Unknown"
