"""A look at everything, again and again: what watches have missed, which APIs there are, what is forbidden."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field

from flowprefill_crd.crd import HASH_ANNOTATION
from flowprefill_crd.schema_hash import SCHEMA_HASH
from flowprefill_operator.apply import Applier
from flowprefill_operator.cluster.client import Cluster
from flowprefill_operator.cluster.errors import ClusterError, Forbidden, NotFound
from flowprefill_operator.controller.metrics import OperatorMetrics
from flowprefill_operator.controller.queue import WorkQueue
from flowprefill_operator.controller.services import Services
from flowprefill_operator.controller.surroundings import Surroundings
from flowprefill_operator.kinds import OWNED, SERVICES, WATCHED, Kind
from flowprefill_operator.observe.store import Store

log = logging.getLogger(__name__)

SELECTOR = "app.kubernetes.io/managed-by=flowprefill-operator,flowprefill.io/service"
"""What the operator's own objects and their pods carry. Every list and watch is narrowed to it by the server."""

FIRST_RETRY_S = 1.0


@dataclass(slots=True, kw_only=True)
class Resync:
    """The loop. `beat_s` is when it last went round, on the monotonic clock."""

    cluster: Cluster
    services: Services
    store: Store
    applier: Applier
    queue: WorkQueue
    surroundings: Surroundings
    metrics: OperatorMetrics
    namespaces: tuple[str, ...]
    every_s: float
    beat_s: float = field(default_factory=time.monotonic)

    async def run(self) -> None:
        """Look, and look again, until cancelled. The first look is repeated soon until it succeeds."""
        while True:
            self.beat_s = time.monotonic()
            try:
                await self.look()
                self.metrics.resyncs.labels("ok").inc()
            except ClusterError as error:
                self.metrics.resyncs.labels("error").inc()
                log.warning("resync not complete", extra={"reason": str(error)})
            await asyncio.sleep(self.every_s if self.surroundings.synced else FIRST_RETRY_S)

    async def look(self) -> None:
        """Look at everything once. What may not be read is noted, and the rest is read all the same."""
        await self._look_at_crd()
        for kind in OWNED:
            if kind.optional:
                await self._look_for(kind)
        first = not self.surroundings.synced
        for kind in (SERVICES, *WATCHED):
            if not self.surroundings.serves(kind):
                continue
            news = 0
            for namespace in self.namespaces or (None,):
                news += await self._list(kind, namespace)
            if news and not first:
                self.metrics.missed.inc(news)
        self.surroundings.looked.set()
        self.applier.keep_only(self.store.uids())
        self._count()
        for key in self.services:
            self.queue.add(key)

    async def _list(self, kind: Kind, namespace: str | None) -> int:
        try:
            items, version = await self.cluster.list(
                kind, namespace=namespace, labels=None if kind == SERVICES else SELECTOR
            )
        except Forbidden as error:
            self.surroundings.deny("list", kind)
            log.warning("kind cannot be listed", extra={"resource": kind.resource, "reason": error.message})
            return 0
        except NotFound:
            return 0
        self.surroundings.allow("list", kind)
        if kind == SERVICES:
            self.services.replace(items, version, namespace)
            return 0
        return self.store.replace(kind, items, version, namespace=namespace)

    async def _look_for(self, kind: Kind) -> None:
        served = await self.cluster.serves(kind)
        if served == self.surroundings.serves(kind) and self.surroundings.synced:
            return
        (self.surroundings.absent.discard if served else self.surroundings.absent.add)(kind)
        if self.surroundings.synced:
            log.info("API appeared" if served else "API is gone", extra={"resource": kind.resource})

    async def _look_at_crd(self) -> None:
        try:
            crd = await self.cluster.crd()
        except Forbidden:
            return  # a namespaced operator may not read it
        found = None if crd is None else (crd["metadata"].get("annotations") or {}).get(HASH_ANNOTATION)
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
        self.metrics.queued.set(len(self.queue))


def _ready(body: object) -> str:
    status = body.get("status") if isinstance(body, dict) else None
    for condition in (status or {}).get("conditions", ()):
        if condition.get("type") == "Ready":
            return str(condition.get("status", "Unknown"))
    return "Unknown"
