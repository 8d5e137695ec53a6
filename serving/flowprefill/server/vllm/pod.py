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
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
from flowprefill_crd import LiveConfig, PodConfig

log = logging.getLogger(__name__)

VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")

START_LOOK_S = 0.5
LOOK_S = 5.0
"""How often the child is asked whether it is well, once it serves."""
UNWELL_S = 60.0
"""A child that answers nothing for so long is given up."""
SILENT_S = 60.0
"""When to say that vLLM serves but its engine core has not told of itself."""
SHOWN_S = 5.0
"""How long `/health` tells of a failure before the pod ends: probes and people see why."""
DRAIN_LOOK_S = 0.2
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
                        observer.hear, on_connected=observer.connected, on_loss=observer.lost
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
            (*self._program, *words), environment(os.environ, launch, around), name="vllm serve"
        )
        api = ApiServer(self._host, self.api_port)
        frame.states.build_by(observer.state)
        patience_s = STOP_S
        try:
            failure = await self._started(frame, observer, child, api)
            if failure is None and self.ready.is_set():
                failure = await self._serving(frame, child, api)
            if failure is None and self.ready.is_set():
                patience_s += await self._drain(frame, observer, child, api)
            if failure is None:
                return 0
            await self._show(frame, failure)
            return 1
        finally:
            await api.close()
            hurry = frame.lifecycle.hurry_asked()
            await child.stop(patience_s, hurry=hurry)
            hurry.cancel()

    async def _started(self, frame: PodFrame, observer: Observer, child: Child, api: ApiServer) -> str | None:
        """Wait until the pod can serve, or a stop; what went wrong, if anything."""
        began_s = time.monotonic()
        serves_since_s: float | None = None
        while not await self._stopping(frame, child, START_LOOK_S):
            if child.death is not None:
                return child.death
            if not await api.healthy():
                continue
            if self._role == "decode" or observer.started:
                frame.lifecycle.enter("ready")
                where = {"host": self._host, "port": self.api_port, "admin_port": self.admin_port}
                seconds = round(time.monotonic() - began_s, 1)
                log.info("serving", extra=frame.facts() | where | {"start_seconds": seconds})
                self.ready.set()
                return None
            now_s = time.monotonic()
            if serves_since_s is None:
                serves_since_s = now_s
            elif now_s - serves_since_s > SILENT_S:
                serves_since_s = now_s
                log.warning("vLLM serves, but its engine core has not told of itself: is our plugin loaded?")
        return None

    async def _serving(self, frame: PodFrame, child: Child, api: ApiServer) -> str | None:
        """Wait for a stop; what went wrong, if anything."""
        well_s = time.monotonic()
        while not await self._stopping(frame, child, LOOK_S):
            if child.death is not None:
                return child.death
            now_s = time.monotonic()
            if await api.healthy():
                well_s = now_s
            elif child.death is None and now_s - well_s > UNWELL_S:
                return f"vllm serve has not answered /health for {UNWELL_S:.0f} s"
        return None

    async def _stopping(self, frame: PodFrame, child: Child, seconds: float) -> bool:
        """Wait that long, not beyond a stop or the child's end; whether a stop was asked for."""
        stop = asyncio.ensure_future(frame.lifecycle.stop_asked())
        try:
            either: set[asyncio.Future[Any]] = {
                stop,
                child.ended,
            }  # Any: results of two types, neither looked at
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return stop.done()
        finally:
            stop.cancel()

    async def _drain(self, frame: PodFrame, observer: Observer, child: Child, api: ApiServer) -> float:
        """Lame duck, then until nobody needs the child; seconds that are left of the drain time."""
        lifecycle, termination = frame.lifecycle, self._config.termination
        lifecycle.enter("lame_duck")
        await lifecycle.pause(termination.lame_duck_seconds)
        lifecycle.enter("draining")
        began_s = time.monotonic()
        drained = asyncio.ensure_future(self._drained(observer, child, api))
        if not await lifecycle.until(drained, termination.drain_seconds):
            log.warning("stopping before all work was done", extra={"role": self._role})
            drained.cancel()
        return max(began_s + termination.drain_seconds - time.monotonic(), 0.0)

    async def _drained(self, observer: Observer, child: Child, api: ApiServer) -> None:
        """Return once the child has no request, twice in a row, and a prefill pod holds no KV that others want."""
        calm = 0
        while calm < 2 and child.death is None:
            wanted = self._role == "prefill" and observer.holds_kv
            calm = calm + 1 if observer.idle or (not wanted and await api.in_flight() == 0) else 0
            await asyncio.sleep(DRAIN_LOOK_S)

    async def _show(self, frame: PodFrame, failure: str) -> None:
        """The pod is broken: say so, for a while."""
        log.critical("the pod cannot serve", extra={"role": self._role, "reason": failure})
        frame.lifecycle.fail(failure)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHOWN_S):
                await frame.lifecycle.stop_asked()
