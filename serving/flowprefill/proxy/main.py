"""Puts a proxy together, runs it, and stops it in order."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flowprefill.clock import MonotonicClock
from flowprefill.errors import InvalidConfiguration
from flowprefill.hosting.admin import admin_app
from flowprefill.hosting.lifecycle import Lifecycle
from flowprefill.logs import configure_logging, set_level
from flowprefill.metrics.proxy import ProxyMetrics
from flowprefill.openai.auth import KeyFile
from flowprefill.proxy.answering import Answerer
from flowprefill.proxy.app import api_app
from flowprefill.proxy.attainment import Attainment
from flowprefill.proxy.budget import FollowUp
from flowprefill.proxy.discovery import Discovery, FileDiscovery
from flowprefill.proxy.dispatcher import Dispatcher
from flowprefill.proxy.documents import follow_live, read_live, read_settings
from flowprefill.proxy.estimate import Estimator
from flowprefill.proxy.exchange import Services
from flowprefill.proxy.pods import PodTable
from flowprefill.proxy.record import Ledger
from flowprefill.proxy.settings import LiveSettings, ProxySettings
from flowprefill.proxy.tokenizing import equip
from flowprefill.proxy.upstream import KVReleases, new_client

log = logging.getLogger(__name__)

SHUTDOWN_S = 5


class Proxy:
    """One proxy on a running event loop. `run` serves until `lifecycle.stop` and returns when all is put away."""

    def __init__(self, settings: ProxySettings, live: LiveSettings, keys: KeyFile | None) -> None:
        self.settings = settings
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
            live=live,
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
            colocated=settings.colocated,
        )
        self.estimator = Estimator(block_size=settings.block_size)
        self.completions, self.chat = (
            Answerer(
                api=api,
                settings=settings,
                services=services,
                estimator=self.estimator,
                ledger=self.ledger,
                live=live,
            )
            for api in ("completions", "chat")
        )
        self.api = api_app(
            settings=settings,
            lifecycle=self.lifecycle,
            completions=self.completions,
            chat=self.chat,
            keys=keys,
        )
        self.admin = admin_app(
            [Route("/v1/attainment", self._attainment, methods=["GET"])],
            lifecycle=self.lifecycle,
            registry=self.metrics.registry,
            before_scrape=self._show,
        )
        self.configure(live)

    def configure(self, live: LiveSettings) -> None:
        """Take over a live document."""
        self.live = live
        classes = live.classes.classes.values()
        self.metrics.slo.configure((c.name, c.ttft_s, c.objective) for c in classes)
        self.metrics.router.live_generation(live.generation)
        self.ledger.logs_requests = live.per_request_log
        self.completions.live = self.chat.live = live
        self.dispatcher.reconfigure(live)

    async def run(
        self, discovery: Discovery, live_path: Path, live_text: str, api: socket.socket, admin: socket.socket
    ) -> None:
        """Serve on two listening sockets until stopped: lame duck, drain, done."""
        patience_s = math.ceil(self.settings.drain_s) + SHUTDOWN_S
        servers = [_Server(self.api, patience_s), _Server(self.admin, SHUTDOWN_S)]
        tasks = [
            asyncio.create_task(self._follow_discovery(discovery), name="discovery"),
            asyncio.create_task(self._follow_live(live_path, live_text), name="live document"),
            asyncio.create_task(
                equip(self.estimator, self.settings.model_uri, self.settings.model_revision), name="tokenizer"
            ),
        ]
        serving = [
            asyncio.create_task(server.serve(sockets=[sock]))
            for server, sock in zip(servers, (api, admin), strict=True)
        ]
        try:
            await _started(servers, serving)
            self.lifecycle.enter("ready")
            await self.lifecycle.stop_asked()
            self.lifecycle.enter("lame_duck")
            await self.lifecycle.pause(self.settings.lame_duck_s)
            self.lifecycle.enter("draining")
            servers[0].should_exit = True
            if not await self.lifecycle.idle(self.settings.drain_s):
                log.warning("drain time is over", extra={"in_flight": self.lifecycle.in_flight})
                await servers[0].cancel_requests()
            self.dispatcher.close()
        finally:
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*serving, return_exceptions=True)
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

    async def _follow_live(self, path: Path, text: str) -> None:
        def refused() -> None:
            self.metrics.router.document_refused("live")

        async for live in follow_live(path, text, refused=refused):
            set_level(live.log_level)
            self.configure(live)
            log.info("live document in use", extra={"generation": live.generation})

    def _show(self) -> None:
        waiting = dict.fromkeys(self.live.classes.classes, 0)
        for request in self.dispatcher.waiting():
            name = self.metrics.slo.known(request.slo_class)
            waiting[name] = waiting.get(name, 0) + 1
        self.metrics.router.show(
            waiting=waiting, outstanding=self.pods.outstanding(), endpoints=self.pods.num_endpoints()
        )

    async def _attainment(self, request: Request) -> Response:
        classes = self.attainment.report(self.live.classes.classes, self.clock.now_s())
        return JSONResponse({"generation": self.live.generation, "classes": classes})


def run(
    config_path: Path, live_path: Path, endpoints_path: Path, host: str, port: int, admin_port: int
) -> int:
    """Run a proxy until SIGTERM or SIGINT; returns the process's exit status.

    Raises InvalidConfiguration when a document cannot be used at the start, OSError when a port cannot be had.
    """
    config, settings = read_settings(config_path)
    live_text, live = read_live(live_path)
    configure_logging(config.log_format, live.log_level)
    keys = KeyFile(Path(settings.api_keys_file)) if settings.api_keys_file else None
    with _listen(host, port) as api, _listen(host, admin_port) as admin:
        log.info(
            "proxy starts",
            extra={"api": f"{host}:{port}", "admin": f"{host}:{admin_port}", "service": settings.service},
        )
        asyncio.run(_run(settings, live, live_text, keys, live_path, endpoints_path, api, admin))
    return 0


async def _run(
    settings: ProxySettings,
    live: LiveSettings,
    live_text: str,
    keys: KeyFile | None,
    live_path: Path,
    endpoints_path: Path,
    api: socket.socket,
    admin: socket.socket,
) -> None:
    proxy = Proxy(settings, live, keys)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, proxy.lifecycle.stop)
    discovery = FileDiscovery(
        endpoints_path, refused=lambda: proxy.metrics.router.document_refused("endpoints")
    )
    await proxy.run(discovery, live_path, live_text, api, admin)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling and access log: the proxy decides when it stops."""

    def __init__(self, app: object, shutdown_s: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]  # any ASGI app
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                date_header=True,
                timeout_graceful_shutdown=shutdown_s,
                timeout_keep_alive=75,
                h11_max_incomplete_event_size=64 * 1024,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def cancel_requests(self) -> None:
        """End what is in flight: every request gets its answer, an error, at once."""
        tasks = list(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _started(servers: list[_Server], serving: list[asyncio.Task[None]]) -> None:
    """Return once both listen; raises what stopped one of them."""
    while not all(server.started for server in servers):
        for task in serving:
            if task.done():
                task.result()
                raise InvalidConfiguration("a server ended before it listened")
        await asyncio.sleep(0.01)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=2048)
    with suppress(OSError):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
