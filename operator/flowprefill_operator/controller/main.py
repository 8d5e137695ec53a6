"""Puts the operator together and runs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator

import aiohttp
from kubernetes.aio.client import ApiClient

from flowprefill_operator.apply import Applier
from flowprefill_operator.cluster.client import Cluster
from flowprefill_operator.cluster.connect import Credentials, connected, credentials
from flowprefill_operator.cluster.lease import LeaseName, LostLease, lead
from flowprefill_operator.config import OperatorConfig
from flowprefill_operator.controller.handlers import Event, quieten, registry
from flowprefill_operator.controller.http import health_app, listen
from flowprefill_operator.controller.metrics import OperatorMetrics
from flowprefill_operator.controller.mounts import Mounts
from flowprefill_operator.controller.prober import Prober
from flowprefill_operator.controller.queue import WorkQueue
from flowprefill_operator.controller.reconcile import Reconciler
from flowprefill_operator.controller.resync import Resync
from flowprefill_operator.controller.services import Services
from flowprefill_operator.controller.surroundings import Surroundings
from flowprefill_operator.controller.watching import Watches
from flowprefill_operator.kinds import Kind
from flowprefill_operator.observe.store import Owner, Store

log = logging.getLogger(__name__)

WORKERS = 8
"""Passes over different services at the same time."""

STALLED_S = 300.0
"""A resync loop that has not gone round for this long, or for five rounds, is stuck."""

DEFAULT_NAMESPACE = "default"


class Operator:
    """One operator process on a running event loop."""

    def __init__(
        self, config: OperatorConfig, found: Credentials, cluster: Cluster, http: aiohttp.ClientSession
    ) -> None:
        self.config = config
        self.metrics = OperatorMetrics()
        self.surroundings = Surroundings()
        self.services = Services()
        self.queue = WorkQueue()
        self.store = Store(self._changed)
        self.prober = Prober(http, self.queue.add)
        self.metrics.queued.set_function(lambda: len(self.queue))
        loop = asyncio.get_running_loop()
        handlers = registry(
            on_service=lambda event: loop.call_soon_threadsafe(self._on_service, event),
            on_object=lambda kind, event: loop.call_soon_threadsafe(self._on_object, kind, event),
            configuration=found.configuration,
        )

        def look_soon() -> None:
            loop.call_soon_threadsafe(self.resync.soon.set)

        self.watches = Watches(handlers, config.namespaces, ended=look_soon)
        mounts = Mounts(cluster)
        applier = Applier(cluster, self.store, served=self.surroundings.serves)
        self.reconciler = Reconciler(
            cluster=cluster,
            services=self.services,
            store=self.store,
            applier=applier,
            prober=self.prober,
            mounts=mounts,
            surroundings=self.surroundings,
            settings=config.plan_settings(namespace=found.namespace),
            metrics=self.metrics,
            instance=identity(),
        )
        self.resync = Resync(
            cluster=cluster,
            services=self.services,
            store=self.store,
            applier=applier,
            mounts=mounts,
            queue=self.queue,
            surroundings=self.surroundings,
            metrics=self.metrics,
            namespaces=config.namespaces,
            every_s=float(config.resync_seconds),
            appeared=self.watches.begin_anew,
        )
        self.standing_by = config.leader_election.enabled
        self.sees_lease = False

    async def work(self, stop: asyncio.Event) -> None:
        """Watch, look and reconcile until `stop`; everything that was started is over on return."""
        self.standing_by = False
        self.metrics.leader.set(1)
        self.resync.beat_s = time.monotonic()
        tasks = [
            asyncio.create_task(self.resync.run(), name="resync"),
            asyncio.create_task(self._passes(), name="passes"),
            asyncio.create_task(self.watches.run(), name="watches"),
            asyncio.create_task(stop.wait(), name="stop"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.prober.close()
            self.metrics.leader.set(0)

    def stalled(self) -> str | None:
        """Why this process should be restarted."""
        silent_s = time.monotonic() - self.resync.beat_s
        if self.standing_by or silent_s < max(STALLED_S, 5 * self.resync.every_s):
            return None
        return f"the resync loop has not gone round for {silent_s:.0f} s"

    def unready(self) -> str | None:
        """Why it neither works nor could: it does not read services, or stands by and does not read the Lease."""
        if self.standing_by:
            return None if self.sees_lease else "the Lease could not be read yet"
        return self.surroundings.unready()

    def lease_seen(self, seen: bool) -> None:
        self.sees_lease = seen

    async def _passes(self) -> None:
        """Passes start when everything has been looked at once: what is there is not to be made anew."""
        await self.surroundings.looked.wait()
        await self.queue.work(self.reconciler, workers=WORKERS)

    def _on_service(self, event: Event) -> None:
        """A service is new, another, or gone."""
        body = event["object"]
        if event["type"] == "DELETED":
            meta = body["metadata"]
            key = (meta["namespace"], meta["name"])
            self.services.drop(key, meta["uid"])
        else:
            key = self.services.put(body)
        self.queue.add(key)

    def _on_object(self, kind: Kind, event: Event) -> None:
        """An object that belongs to a service is new, another, or gone."""
        (self.store.drop if event["type"] == "DELETED" else self.store.put)(kind, event["object"])

    def _changed(self, owner: Owner) -> None:
        key = self.services.key_of(owner)
        if key is not None and self.surroundings.synced:
            self.queue.add(key)


def run(config: OperatorConfig) -> int:
    """Run the operator until SIGTERM or SIGINT; the process's exit status.

    Raises `NoCluster` without a cluster to talk to, OSError for a port that cannot be had.
    """
    return asyncio.run(_run(config))


async def _run(config: OperatorConfig) -> int:
    quieten()
    stop = asyncio.Event()
    with _stopped_by_signals(stop):
        return await _work(config, stop)


async def _work(config: OperatorConfig, stop: asyncio.Event) -> int:
    found = await credentials()
    async with connected(found) as (cluster, api), aiohttp.ClientSession() as http:
        operator = Operator(config, found, cluster, http)
        app = health_app(operator.metrics.registry, stalled=operator.stalled, unready=operator.unready)
        runner, port = await listen(app, config.port)
        where = ", ".join(config.namespaces) or "all namespaces"
        log.info(
            "operator starts", extra={"api": found.configuration.host, "port": port, "namespaces": where}
        )
        try:
            await _until_stopped(config, found, operator, api, stop)
        except LostLease as error:
            log.error("lease lost", extra={"reason": str(error)})
            return 1
        finally:
            await runner.cleanup()
    log.info("operator stopped")
    return 0


async def _until_stopped(
    config: OperatorConfig, found: Credentials, operator: Operator, api: ApiClient, stop: asyncio.Event
) -> None:
    election = config.leader_election
    if not election.enabled:
        await operator.work(stop)
        return
    at = LeaseName(
        namespace=election.lease_namespace or found.namespace or DEFAULT_NAMESPACE,
        name=election.lease_name,
        identity=identity(),
        lease_s=election.lease_seconds,
    )

    leading = asyncio.create_task(
        lead(api, at, lambda: operator.work(stop), seen=operator.lease_seen), name="leader"
    )
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({leading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not leading.done() and operator.standing_by:
            return
        await leading
    finally:
        stopping.cancel()
        leading.cancel()
        await asyncio.gather(leading, stopping, return_exceptions=True)


def identity() -> str:
    """Who this process is to the others: its pod, or host and process number outside a cluster."""
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"


@contextlib.contextmanager
def _stopped_by_signals(stop: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
