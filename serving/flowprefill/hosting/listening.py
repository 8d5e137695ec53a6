"""uvicorn servers inside our own event loop: ports that may be chosen by the system, stops that we order."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from flowprefill.errors import InvalidConfiguration
from flowprefill.hosting.lifecycle import Lifecycle

KEEP_ALIVE_S = 75
BACKLOG = 2048


class _QuietServer(uvicorn.Server):
    """Leaves the process's signals to whoever runs it, and wakes once a second instead of ten times."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    async def main_loop(self) -> None:
        ticks = 0  # uvicorn counts tenths of a second and renews the Date header at whole ones
        while not await self.on_tick(ticks):
            ticks = (ticks + 10) % 864_000
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def cancel_requests(self) -> None:
        tasks = list(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class HttpServer:
    """One app on one port."""

    def __init__(self, app: ASGIApp, *, at: socket.socket, drain_s: float) -> None:
        """`at` comes from `bound`. `drain_s` bounds how long `stop` waits for answers under way."""
        self._socket = at
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(drain_s)),
        )
        self._server = _QuietServer(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return once connections are accepted."""
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise InvalidConfiguration(f"the server on port {port_of(self._socket)} ended at its start")
            await asyncio.sleep(0.005)

    async def serve_until_drained(self, lifecycle: Lifecycle, *, lame_duck_s: float) -> float:
        """Answer until a stop is asked for, then as a lame duck, then let running answers end.

        Returns when draining began, as `time.monotonic` tells it.
        """
        await lifecycle.stop_asked()
        lifecycle.enter("lame_duck")
        await lifecycle.pause(lame_duck_s)
        lifecycle.enter("draining")
        began_s = time.monotonic()
        hurry = lifecycle.hurry_asked()
        await self.stop(hurry=hurry)
        hurry.cancel()
        return began_s

    async def stop(self, *, hurry: asyncio.Future[None] | None = None) -> None:
        """Accept nothing new and let answers under way end, within the drain time or until `hurry` is done; what is
        left then is cancelled."""
        if self._serving is None:
            self._socket.close()
            return
        self._server.should_exit = True
        self._server.stopping.set()
        if hurry is not None:
            await asyncio.wait({self._serving, hurry}, return_when=asyncio.FIRST_COMPLETED)
            if hurry.done():
                await self._server.cancel_requests()
        await self._serving


def bound(host: str, port: int) -> socket.socket:
    """A socket that has its port and does not listen yet, so that a port in use is an error before a model loads.

    Port 0 lets the system choose. Raises `InvalidConfiguration`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit it. A token is a small write after another one: without this it would wait for the
    # client's delayed acknowledgement, 40 ms on a connection that is used again.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise InvalidConfiguration(
            f"cannot listen on {host}:{port}: {error.strerror}; give a free port of this machine, or 0"
        ) from None
    made.setblocking(False)
    return made


def port_of(at: socket.socket) -> int:
    """The port of a bound socket."""
    return int(at.getsockname()[1])
