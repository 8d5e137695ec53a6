"""A pod of the vLLM engine from start to stop: this process, and `vllm serve` as its child.

1. Open the admin port (`/health` and `/v1/config` answer while the model loads), fetch the model, start the child.
2. The child's `/health` is 200 and its engine core has told of itself (a decode pod's is stock vLLM and tells nothing): ready.
3. SIGTERM or SIGINT: lame duck, then wait until the child has no request and nobody needs its KV, within the drain time;
   then stop the child. A second signal hurries. Exit code 0.
4. A child that dies, or answers no more: not live, with the reason, for a while; then stop with exit code 1.

The API port is the child's own. It takes requests until it ends, also from a lame duck, and closes no connection before: our
proxies leave because the state stream says `draining`, others because the pod is no endpoint any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from flowprefill.hosting.daemon import in_daemon
from flowprefill.hosting.documents import LiveDocument
from flowprefill.hosting.listening import bound, port_of
from flowprefill.server.frame import PodFrame, RoleName, advertised
from flowprefill.server.vllm.child import Child
from flowprefill.server.vllm.environment import Surroundings, environment
from flowprefill.server.vllm.flags import Device, Launch, command_line
from flowprefill.server.vllm.listening_end import ParentChannel
from flowprefill.server.vllm.observer import Observer
from flowprefill.server.vllm.preparing import (
    Prepared,
    PrivateFiles,
    free_port,
    installed_device,
    prepare,
    torch_openmp,
)
from flowprefill.server.vllm.probing import ApiServer
from flowprefill.server.vllm.refused_flags import check, parsed
from flowprefill.server.vllm.watch import ChildFailed, Watch
from flowprefill_crd import LiveConfig, PodConfig

log = logging.getLogger(__name__)

VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")

STOP_S = 8.0
"""How long vLLM may take to end once it has nothing to do; pods have 10 s beyond their drain time."""


def run(
    role: RoleName,
    config: PodConfig,
    live: LiveDocument[LiveConfig],
    *,
    host: str,
    port: int,
    admin_port: int,
    kv_port: int,
    extra: Sequence[str] = (),
) -> int:
    """Serve until stopped; the exit code. `extra` are flags of `vllm serve` beside `engine.args`.

    Raises `InvalidConfiguration` or `ModelNotLoadable` when the pod cannot start.
    """
    device = installed_device()
    pod = VllmPod(
        role,
        config,
        live,
        host=host,
        port=port,
        admin_port=admin_port,
        kv_port=kv_port,
        device=device,
        extra=extra,
    )
    code = asyncio.run(pod.run())
    if pod.gave_up_preparing:
        # The thread that fetches cannot be ended, and Python would wait for it.
        logging.shutdown()
        os._exit(code)
    return code


class VllmPod:
    """One pod. `run` returns after a stop; `ready` is set once the child takes requests."""

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
        device: Device,
        extra: Sequence[str] = (),
        handle_signals: bool = True,
        program: Sequence[str] = VLLM,
        prepare: Callable[[PodConfig, str, Device], Prepared] = prepare,
    ) -> None:
        """`program` is what the flags are given to; `prepare` is called in a thread and finds the model."""
        self._role: RoleName = role
        self._config = config
        self._live = live
        self._host = host
        self._kv_port = kv_port
        self._device: Device = device
        self._extra = tuple(extra)
        self._handle_signals = handle_signals
        self._program = tuple(program)
        self._prepare = prepare
        self._frame: PodFrame | None = None
        self.api_port = port
        self.admin_port = admin_port
        self.ready = asyncio.Event()
        self.child: Child | None = None
        self.gave_up_preparing = False

    def stop(self) -> None:
        """Begin to stop, as a signal does; called again, hurry."""
        if self._frame is not None:
            self._frame.lifecycle.stop()

    async def run(self) -> int:
        """Start, serve, stop; the exit code. Raises `InvalidConfiguration` or `ModelNotLoadable`."""
        check(parsed((*self._config.engine.args, *self._extra)))
        frame = self._frame = PodFrame(self._role, self._config, self._live)
        with (
            contextlib.closing(bound(self._host, self.admin_port)) as at,
            contextlib.closing(PrivateFiles()) as files,
        ):
            self.admin_port = port_of(at)
            self.api_port = free_port(self._host, self.api_port)
            if self._role != "colocated":
                self._kv_port = free_port(self._host, self._kv_port)
            async with frame.open(at, handle_signals=self._handle_signals):
                prepared = await self._prepared(frame)
                if prepared is None:
                    return 0
                channel: ParentChannel | None = None
                if self._role != "decode":
                    observer = Observer(
                        frame, lambda message: None if channel is None else channel.send(message)
                    )
                    channel = ParentChannel(
                        files.socket, observer.hear, on_connected=observer.connected, on_loss=observer.lost
                    )
                else:
                    observer = Observer(frame)
                try:
                    return await self._with_child(frame, observer, prepared, channel, files)
                finally:
                    frame.forget()
                    if channel is not None:
                        await channel.close()

    async def _prepared(self, frame: PodFrame) -> Prepared | None:
        """The model and its sizes; None when a stop was asked for meanwhile."""
        preparing = asyncio.ensure_future(
            in_daemon(lambda: self._prepare(self._config, self._role, self._device), name="preparing")
        )
        stop = asyncio.ensure_future(frame.lifecycle.stop_asked())
        try:
            await asyncio.wait({preparing, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not preparing.done():
                log.info("stopped while the model was fetched", extra={"role": self._role})
                self.gave_up_preparing = True
                preparing.cancel()
                return None
            return preparing.result()
        finally:
            stop.cancel()

    async def _with_child(
        self,
        frame: PodFrame,
        observer: Observer,
        prepared: Prepared,
        channel: ParentChannel | None,
        files: PrivateFiles,
    ) -> int:
        frame.insides.append(observer)  # from here on it is told of changes of the live document
        config, live = self._config, self._live.current
        launch = Launch(
            role=self._role,
            config=config,
            live=live,
            device=self._device,
            model=prepared.model,
            model_len=prepared.model_len,
            kv_cache_tokens=prepared.kv_cache_tokens,
            host=self._host,
            port=self.api_port,
            channel=None if channel is None else channel.address,
            profile=prepared.profile,
            keys_file=(
                files.api_keys(Path(config.api_keys_file))
                if self._role == "colocated" and config.api_keys_file is not None
                else None
            ),
        )
        around = Surroundings(
            channel_key=None if channel is None else channel.key,
            advertise_host=advertised(self._host),
            kv_port=self._kv_port,
            kv_bytes=prepared.kv_bytes,
            gomp=torch_openmp(),
            logging_config=files.logging(config.log_format, live.log_level),
        )
        words = command_line(launch, self._extra)
        log.info("starting vLLM", extra={"flags": " ".join(words[2:]), "model": str(prepared.model.path)})
        child = self.child = await Child.start(
            (*self._program, *words),
            environment(os.environ, launch, around),
            name="vllm serve",
            folder=files.folder,
        )
        api = ApiServer(self._host, self.api_port)
        frame.states.build_by(observer.state)
        watch = Watch(frame, observer, child, api)
        patience_s = STOP_S
        try:
            if await watch.until_ready():
                where = {"host": self._host, "port": self.api_port, "admin_port": self.admin_port}
                log.info("serving", extra=frame.facts() | where)
                self.ready.set()
                if await watch.until_stop():
                    patience_s += await watch.drain()
            return 0
        except ChildFailed as failure:
            await watch.show(str(failure))
            return 1
        finally:
            await api.close()
            hurry = frame.lifecycle.hurry_asked()
            await child.stop(patience_s, hurry=hurry)
            hurry.cancel()
