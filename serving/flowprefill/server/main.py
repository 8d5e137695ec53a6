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
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from flowprefill.errors import InvalidConfiguration
from flowprefill.hosting.auth import KeyFile
from flowprefill.hosting.daemon import in_daemon
from flowprefill.hosting.documents import LiveDocument, read_pod_config
from flowprefill.hosting.lifecycle import Lifecycle
from flowprefill.hosting.listening import HttpServer, bound, port_of
from flowprefill.logs import configure_logging
from flowprefill.server.frame import PodFrame, RoleName, advertised
from flowprefill.server.http import api_app
from flowprefill.server.loading import Loaded, load
from flowprefill.server.role import Pod
from flowprefill.server.roles import new_role
from flowprefill.server.settings import checked
from flowprefill_crd import LiveConfig, PodConfig

log = logging.getLogger(__name__)


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
    if config.engine.type == "vllm":
        from flowprefill.server.vllm.pod import run as run_vllm

        return run_vllm(role, config, live, host=host, port=port, admin_port=admin_port, kv_port=kv_port)
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
        frame = PodFrame(self._role_name, self._config, self._live)
        self._lifecycle = frame.lifecycle
        sockets = self._bind()
        try:
            async with frame.open(sockets["admin"], handle_signals=self._handle_signals):
                loaded = await self._loaded(frame.lifecycle)
                if loaded is not None:
                    await self._serve(loaded, frame, sockets)
        finally:
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

    async def _serve(self, loaded: Loaded, frame: PodFrame, sockets: dict[str, socket.socket]) -> None:
        config, live, lifecycle = self._config, self._live, frame.lifecycle
        pod = Pod(
            role=self._role_name,
            config=config,
            live=live,
            lifecycle=lifecycle,
            metrics=frame.metrics,
            states=frame.states,
            engine=loaded.engine,
            texts=loaded.texts,
            created=int(time.time()),
        )
        if loaded.profile is not None:
            frame.describe_predictor(loaded.profile)
        role = new_role(pod, loaded, kv_socket=sockets.get("kv"), advertise_host=advertised(self._host))
        keys = None
        if self._role_name == "colocated" and config.api_keys_file is not None:
            keys = KeyFile(Path(config.api_keys_file))
        app = api_app(
            role.routes,
            lifecycle=lifecycle,
            metrics=frame.metrics.pod,
            keys=keys,
            logs_requests=lambda: live.current.per_request_log,
        )
        termination = config.termination
        api = HttpServer(app, at=sockets["api"], drain_s=termination.drain_seconds)
        frame.insides.append(role)
        try:
            await role.start()
            frame.states.build_by(role.state)
            lifecycle.probe(role.failure)
            await api.start()
            lifecycle.enter("ready")
            ports = {"host": self._host, "port": self.api_port, "admin_port": self.admin_port}
            log.info("serving", extra=frame.facts() | ports)
            self.ready.set()
            draining_s = await api.serve_until_drained(lifecycle, lame_duck_s=termination.lame_duck_seconds)
            drained = asyncio.ensure_future(role.drained())
            left_s = draining_s + termination.drain_seconds - time.monotonic()
            if not await lifecycle.until(drained, left_s):
                log.warning("stopping before all work was done", extra={"role": self._role_name})
                drained.cancel()
        finally:
            await api.stop()
            frame.forget()
            await role.close()
            loaded.texts.close()
            await asyncio.to_thread(loaded.engine.close)
