"""Puts a proxy together, runs it, and stops it in order."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flowprefill.clock import MonotonicClock
from flowprefill.errors import reason_of
from flowprefill.hosting.admin import InUse, admin_app
from flowprefill.hosting.auth import KeyFile
from flowprefill.hosting.documents import LiveDocument, read_pod_config
from flowprefill.hosting.lifecycle import Lifecycle, stopped_by_signals
from flowprefill.hosting.listening import HttpServer, bound
from flowprefill.logs import configure_logging, set_level
from flowprefill.metrics.proxy import ProxyMetrics
from flowprefill.proxy.answering import Answerer
from flowprefill.proxy.app import api_app
from flowprefill.proxy.attainment import Attainment
from flowprefill.proxy.budget import FollowUp
from flowprefill.proxy.discovery import Discovery, FileDiscovery
from flowprefill.proxy.dispatcher import Dispatcher
from flowprefill.proxy.estimate import Estimator
from flowprefill.proxy.exchange import Services
from flowprefill.proxy.pods import PodTable
from flowprefill.proxy.record import Ledger
from flowprefill.proxy.round_trip import RoundTrips
from flowprefill.proxy.settings import LiveSettings, ProxySettings, live_settings, proxy_settings
from flowprefill.proxy.tokenizing import equip
from flowprefill.proxy.upstream import KVReleases, new_client

log = logging.getLogger(__name__)

ADMIN_DRAIN_S = 5.0


class Proxy:
    """One proxy on a running event loop. `run` serves until `lifecycle.stop` and returns when all is put away."""

    def __init__(
        self, settings: ProxySettings, live: LiveDocument[LiveSettings], keys: KeyFile | None
    ) -> None:
        self.settings = settings
        self.live = live
        self.lifecycle = Lifecycle("proxy")
        self.clock = MonotonicClock()
        self.metrics = ProxyMetrics(service=settings.service, model_name=settings.served_name)
        self.attainment = Attainment()
        self.http = new_client(
            max_connections=settings.max_connections, connect_timeout_s=settings.connect_timeout_s
        )
        self.follow_up = FollowUp()
        self.pods = PodTable(
            http=self.http,
            clock=self.clock,
            colocated=settings.colocated,
            own_revision=settings.revision,
            changed=self._pods_changed,
            removed=self.follow_up.forget,
        )
        self.dispatcher = Dispatcher(
            clock=self.clock,
            pods=self.pods,
            live=live.current,
            queue_limit=settings.queue_limit,
            pod_wait_s=settings.pod_wait_s,
        )
        self.releases = KVReleases(self.http)
        self.ledger = Ledger(metrics=self.metrics, attainment=self.attainment)
        services = Services(
            clock=self.clock,
            http=self.http,
            dispatcher=self.dispatcher,
            pods=self.pods,
            follow_up=self.follow_up,
            releases=self.releases,
            metrics=self.metrics.router,
        )
        self.estimator = Estimator(block_size=settings.block_size)
        self.completions, self.chat = (
            Answerer(
                api=api,
                settings=settings,
                services=services,
                estimator=self.estimator,
                ledger=self.ledger,
                live=live.current,
            )
            for api in ("completions", "chat")
        )
        self.round_trips = RoundTrips(
            services,
            self.metrics.control,
            served_name=settings.served_name,
            api_key=lambda: None if keys is None else keys.one(),
            limit_s=settings.round_trip_s,
        )
        self.api = api_app(
            settings=settings,
            lifecycle=self.lifecycle,
            completions=self.completions,
            chat=self.chat,
            keys=keys,
        )
        self.admin = admin_app(
            [
                Route("/v1/attainment", self._attainment, methods=["GET"]),
                Route("/v1/round-trip", self.round_trips.answer, methods=["POST"]),
            ],
            in_use=InUse(
                role="proxy", revision=settings.revision, generation=lambda: live.current.generation
            ),
            lifecycle=self.lifecycle,
            registry=self.metrics.registry,
            before_scrape=self._show,
        )
        self.configure(live.current)
        live.subscribe(changed=self.configure, refused=lambda: self.metrics.router.document_refused("live"))

    def configure(self, live: LiveSettings) -> None:
        """Take over a live document."""
        set_level(live.log_level)
        classes = live.classes.classes.values()
        self.metrics.slo.configure((c.name, c.ttft_s, c.objective) for c in classes)
        self.metrics.router.live_generation(live.generation)
        self.ledger.logs_requests = live.per_request_log
        self.completions.live = self.chat.live = live
        self.dispatcher.reconfigure(live)

    async def run(self, discovery: Discovery, api: socket.socket, admin: socket.socket) -> None:
        """Serve on two bound sockets until stopped: lame duck, drain, done."""
        answers = HttpServer(self.api, at=api, drain_s=self.settings.drain_s)
        probes = HttpServer(self.admin, at=admin, drain_s=ADMIN_DRAIN_S)
        following = asyncio.create_task(self._follow_discovery(discovery), name="discovery")
        following.add_done_callback(self._discovery_ended)
        tasks = [
            following,
            asyncio.create_task(self.live.watch(), name="live document"),
            asyncio.create_task(
                equip(self.estimator, self.settings.model_uri, self.settings.model_revision), name="tokenizer"
            ),
        ]
        try:
            await probes.start()
            await answers.start()
            self.lifecycle.enter("ready")
            await answers.serve_until_drained(self.lifecycle, lame_duck_s=self.settings.lame_duck_s)
            self.dispatcher.close()
        finally:
            await answers.stop()
            await probes.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.pods.close()
            await self.releases.close()
            await self.http.aclose()
            self.lifecycle.enter("stopped")

    def _pods_changed(self) -> None:
        self.dispatcher.wake()

    async def _follow_discovery(self, discovery: Discovery) -> None:
        async for endpoints in discovery.watch():
            self.pods.update(endpoints)

    def _discovery_ended(self, following: asyncio.Task[None]) -> None:
        """A proxy that no longer hears of pods is of no use: it fails its liveness probe and is started anew."""
        if not following.cancelled() and (error := following.exception()) is not None:
            log.error("discovery ended", exc_info=error)
            self.lifecycle.fail(f"discovery ended: {reason_of(error)}")

    def _show(self) -> None:
        waiting = dict.fromkeys(self.live.current.classes.classes, 0)
        for request in self.dispatcher.waiting():
            name = self.metrics.slo.known(request.slo_class)
            waiting[name] = waiting.get(name, 0) + 1
        self.metrics.router.show(
            waiting=waiting, outstanding=self.pods.outstanding(), endpoints=self.pods.num_endpoints()
        )

    async def _attainment(self, request: Request) -> Response:
        live = self.live.current
        classes = self.attainment.report(live.classes.classes, self.clock.now_s())
        return JSONResponse({"generation": live.generation, "classes": classes})


def run(
    config_path: Path,
    live_path: Path,
    endpoints_path: Path | None,
    host: str,
    port: int,
    admin_port: int,
) -> int:
    """Run a proxy until SIGTERM or SIGINT; returns the process's exit status.

    Pods are in the file at `endpoints_path`; None: in the EndpointSlices of the service's namespace.
    Raises InvalidConfiguration when a document or the credentials cannot be used at the start or a port cannot be had.
    """
    config = read_pod_config(config_path)
    settings = proxy_settings(config)
    live = LiveDocument(live_path, live_settings)
    configure_logging(config.log_format, live.current.log_level)
    keys = KeyFile(Path(settings.api_keys_file)) if settings.api_keys_file else None
    with bound(host, port) as api, bound(host, admin_port) as admin:
        log.info(
            "proxy starts",
            extra={"api": f"{host}:{port}", "admin": f"{host}:{admin_port}", "service": settings.service},
        )
        asyncio.run(_run(settings, live, keys, endpoints_path, api, admin))
    return 0


async def _run(
    settings: ProxySettings,
    live: LiveDocument[LiveSettings],
    keys: KeyFile | None,
    endpoints_path: Path | None,
    api: socket.socket,
    admin: socket.socket,
) -> None:
    proxy = Proxy(settings, live, keys)
    async with _discovery(settings, endpoints_path, proxy.metrics) as discovery:
        with stopped_by_signals(proxy.lifecycle):
            await proxy.run(discovery, api, admin)


@asynccontextmanager
async def _discovery(
    settings: ProxySettings, endpoints_path: Path | None, metrics: ProxyMetrics
) -> AsyncIterator[Discovery]:
    if endpoints_path is not None:
        yield FileDiscovery(endpoints_path, refused=lambda: metrics.router.document_refused("endpoints"))
        return
    # Only here: where pods are listed in a file, the Kubernetes client is neither needed nor loaded.
    from flowprefill.proxy.kubernetes_discovery import kubernetes_discovery

    async with kubernetes_discovery(
        namespace=settings.namespace, service=settings.service, counts=metrics.control
    ) as discovery:
        yield discovery
