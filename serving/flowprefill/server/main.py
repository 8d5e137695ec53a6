"""A pod from start to stop.

1. Read both documents, follow the live one, open the admin port (`/health` and `/v1/config` answer while the model
   loads; a stop ends the process at once).
2. Load the engine in a thread, take or measure the predictor's profile, start the role, open the API port: ready.
3. SIGTERM or SIGINT: lame duck, then accept nothing new and let answers end, then wait until nobody needs the pod
   (a prefill pod: until its KV is pulled or its leases have ended), all within the drain time. A second signal hurries.
4. Close the role, the engine, the admin port; exit code 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry

from flowprefill.errors import InvalidConfiguration
from flowprefill.hosting.admin import InUse, admin_app
from flowprefill.hosting.auth import KeyFile
from flowprefill.hosting.daemon import in_daemon
from flowprefill.hosting.documents import LiveDocument, read_pod_config
from flowprefill.hosting.lifecycle import Lifecycle, stopped_by_signals
from flowprefill.hosting.listening import HttpServer, bound, port_of
from flowprefill.logs import configure_logging, set_level
from flowprefill.metrics.engine import EngineMetrics, engine_metrics
from flowprefill.scheduling.profile import Profile
from flowprefill.server.admin import admin_routes
from flowprefill.server.http import api_app
from flowprefill.server.loading import Loaded, load
from flowprefill.server.role import Pod, Role
from flowprefill.server.roles import new_role
from flowprefill.server.settings import checked
from flowprefill.server.state import StateHub
from flowprefill.server.states import starting_state
from flowprefill_crd import LiveConfig, PodConfig

log = logging.getLogger(__name__)

RoleName = Literal["prefill", "decode", "colocated"]

ADMIN_DRAIN_S = 1.0


def run(
    role: RoleName,
    config_path: Path,
    live_path: Path,
    host: str,
    port: int,
    admin_port: int,
    kv_port: int,
) -> int:
    """Serve until stopped; returns the exit code.

    Raises `InvalidConfiguration` or `ModelNotLoadable` when the pod cannot start.
    """
    config = read_pod_config(config_path)
    live = LiveDocument(live_path, checked)
    configure_logging(config.log_format, live.current.log_level)
    server = PodServer(role, config, live, host=host, port=port, admin_port=admin_port, kv_port=kv_port)
    asyncio.run(server.run())
    if server.gave_up_loading:
        # The thread that loads cannot be ended, and Python would wait for it.
        logging.shutdown()
        os._exit(0)
    return 0


class PodServer:
    """One pod. `run` returns after a stop; `ready` is set once the API port takes requests."""

    def __init__(
        self,
        role: RoleName,
        config: PodConfig,
        live: LiveDocument[LiveConfig],
        *,
        host: str,
        port: int,
        admin_port: int,
        kv_port: int,
        handle_signals: bool = True,
        load: Callable[[PodConfig, str], Loaded] = load,
    ) -> None:
        """`load` is called in a thread and gives the engine."""
        self._load = load
        self._role_name: RoleName = role
        self._config = config
        self._live = live
        self._host, self._port, self._admin_port, self._kv_port = host, port, admin_port, kv_port
        self._handle_signals = handle_signals
        self.ready = asyncio.Event()
        self.gave_up_loading = False
        self.api_port = port
        self.admin_port = admin_port
        self._lifecycle: Lifecycle | None = None

    def stop(self) -> None:
        """Begin to stop, as a signal does; called again, hurry."""
        if self._lifecycle is not None:
            self._lifecycle.stop()

    async def run(self) -> None:
        """Start, serve, stop."""
        config = self._config
        metrics = engine_metrics(
            CollectorRegistry(),
            service=config.service,
            model_name=config.model.served_name,
            role=self._role_name,
            classes=[c.name for c in self._live.current.slo_classes],
        )
        metrics.pod.live_generation(self._live.current.generation)
        states = StateHub(
            lambda sequence: starting_state(role=self._role_name, revision=config.revision, sequence=sequence)
        )
        lifecycle = Lifecycle("pod")
        lifecycle.subscribe(lambda: _phase_changed(lifecycle, metrics, states))
        self._lifecycle = lifecycle
        roles: list[Role] = []
        self._live.subscribe(
            changed=lambda current: _live_changed(current, roles, metrics, states),
            refused=metrics.pod.live_document_refused,
        )
        sockets = self._bind()
        admin = HttpServer(
            admin_app(
                admin_routes(states=states, history=lambda: roles[0].history() if roles else {}),
                in_use=InUse(
                    role=self._role_name,
                    revision=config.revision,
                    generation=lambda: self._live.current.generation,
                ),
                lifecycle=lifecycle,
                registry=metrics.registry,
                before_scrape=lambda: _before_scrape(metrics, lifecycle, roles),
            ),
            at=sockets["admin"],
            drain_s=ADMIN_DRAIN_S,
        )
        with stopped_by_signals(lifecycle) if self._handle_signals else contextlib.nullcontext():
            await admin.start()
            watching = asyncio.ensure_future(self._live.watch())
            try:
                loaded = await self._loaded(lifecycle)
                if loaded is not None:
                    await self._serve(loaded, lifecycle, metrics, states, roles, sockets)
            finally:
                watching.cancel()
                lifecycle.enter("stopped")
                states.close()
                await admin.stop()
                for at in sockets.values():
                    at.close()

    def _bind(self) -> dict[str, socket.socket]:
        """Take all ports before a model is loaded for minutes."""
        wanted = {"api": self._port, "admin": self._admin_port}
        if self._role_name == "prefill":
            wanted["kv"] = self._kv_port
        sockets: dict[str, socket.socket] = {}
        try:
            for name, port in wanted.items():
                sockets[name] = bound(self._host, port)
        except InvalidConfiguration:
            for at in sockets.values():
                at.close()
            raise
        self.api_port, self.admin_port = port_of(sockets["api"]), port_of(sockets["admin"])
        return sockets

    def _facts(self, live: LiveConfig) -> dict[str, object]:
        """What the log says about a pod that begins to serve."""
        return {
            "role": self._role_name,
            "host": self._host,
            "port": self.api_port,
            "admin_port": self.admin_port,
            "revision": self._config.revision,
            "generation": live.generation,
            "policy": live.policy,
            "preemption": live.preemption,
            "batch_token_budget": live.batch_token_budget,
            "chunk_tokens": live.chunk_tokens,
            "slo_classes": [c.name for c in live.slo_classes],
        }

    async def _loaded(self, lifecycle: Lifecycle) -> Loaded | None:
        """The engine and what belongs to it; None when a stop was asked for meanwhile."""
        loading = asyncio.ensure_future(
            in_daemon(lambda: self._load(self._config, self._role_name), name="loading")
        )
        stop = asyncio.ensure_future(lifecycle.stop_asked())
        try:
            await asyncio.wait({loading, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                log.info("stopped while the model was loading", extra={"role": self._role_name})
                self.gave_up_loading = True
                loading.cancel()
                return None
            loaded = loading.result()
            if stop.done():
                await asyncio.to_thread(loaded.engine.close)
                return None
            return loaded
        finally:
            stop.cancel()

    async def _serve(
        self,
        loaded: Loaded,
        lifecycle: Lifecycle,
        metrics: EngineMetrics,
        states: StateHub,
        roles: list[Role],
        sockets: dict[str, socket.socket],
    ) -> None:
        config, live = self._config, self._live
        pod = Pod(
            role=self._role_name,
            config=config,
            live=live,
            lifecycle=lifecycle,
            metrics=metrics,
            states=states,
            engine=loaded.engine,
            texts=loaded.texts,
            created=int(time.time()),
        )
        if loaded.profile is not None:
            _describe_predictor(metrics, loaded.profile)
        role = new_role(pod, loaded, kv_socket=sockets.get("kv"), advertise_host=_advertised(self._host))
        keys = None
        if self._role_name == "colocated" and config.api_keys_file is not None:
            keys = KeyFile(Path(config.api_keys_file))
        app = api_app(
            role.routes,
            lifecycle=lifecycle,
            metrics=metrics.pod,
            keys=keys,
            logs_requests=lambda: live.current.per_request_log,
        )
        termination = config.termination
        api = HttpServer(app, at=sockets["api"], drain_s=termination.drain_seconds)
        roles.append(role)
        try:
            await role.start()
            states.build_by(role.state)
            lifecycle.probe(role.failure)
            await api.start()
            lifecycle.enter("ready")
            log.info("serving", extra=self._facts(live.current))
            self.ready.set()
            draining_s = await api.serve_until_drained(lifecycle, lame_duck_s=termination.lame_duck_seconds)
            drained = asyncio.ensure_future(role.drained())
            left_s = draining_s + termination.drain_seconds - time.monotonic()
            if not await lifecycle.until(drained, left_s):
                log.warning("stopping before all work was done", extra={"role": self._role_name})
                drained.cancel()
        finally:
            await api.stop()
            roles.clear()
            states.build_by(
                lambda sequence: starting_state(
                    role=self._role_name, revision=config.revision, sequence=sequence
                )
            )
            await role.close()
            loaded.texts.close()
            await asyncio.to_thread(loaded.engine.close)


def _describe_predictor(metrics: EngineMetrics, profile: Profile) -> None:
    taken = profile.provenance
    metrics.scheduler.predictor(
        version=version("flowprefill"),
        model=taken.model,
        tp=taken.tensor_parallel_size,
        gpu=taken.device,
        created=taken.taken_on.isoformat(),
    )


def _before_scrape(metrics: EngineMetrics, lifecycle: Lifecycle, roles: Sequence[Role]) -> None:
    metrics.pod.ready(lifecycle.ready)
    for role in roles:
        role.before_scrape()


def _phase_changed(lifecycle: Lifecycle, metrics: EngineMetrics, states: StateHub) -> None:
    metrics.pod.ready(lifecycle.ready)
    states.changed()


def _live_changed(live: LiveConfig, roles: Sequence[Role], metrics: EngineMetrics, states: StateHub) -> None:
    set_level(live.log_level)
    metrics.pod.live_generation(live.generation)
    metrics.scheduler.set_classes([c.name for c in live.slo_classes])
    for role in roles:
        role.reconfigure(live)
    states.changed()


def _advertised(host: str) -> str:
    """The address at which other pods reach this one: Kubernetes's POD_IP, else the address it listens on."""
    if pod_ip := os.environ.get("POD_IP"):
        return pod_ip
    if host in ("0.0.0.0", "::", ""):
        return socket.gethostbyname(socket.gethostname())
    return host
