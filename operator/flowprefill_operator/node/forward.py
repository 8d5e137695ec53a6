"""What a Service is on this machine: one port that leads to the ready pods behind it.

A connection goes to the next ready pod in turn and stays there, as with kube-proxy; a pod that stops gets no new
connections but keeps the ones it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence

_log = logging.getLogger(__name__)

PIECE_BYTES = 65_536
MAX_CONNECTIONS = 4096
"""Connections at the same time through one port; further ones wait in the listen backlog."""


class Forwarder:
    """Accepts on one port; `backends` is asked for (host, port) pairs at every new connection."""

    def __init__(self, backends: Callable[[], Sequence[tuple[str, int]]]) -> None:
        self._backends = backends
        self._turn = itertools.count()
        self._server: asyncio.Server | None = None
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> int:
        """Start to accept; the port in use (0 chooses one). Raises OSError when the port is taken."""
        self._server = await asyncio.start_server(self._accept, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop accepting and cut the connections that are left."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            async with self._slots:
                await self._serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._connections.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        backends = self._backends()
        first = next(self._turn)
        for step in range(len(backends)):
            host, port = backends[(first + step) % len(backends)]
            try:
                pod_reader, pod_writer = await asyncio.open_connection(host, port)
            except OSError:
                continue
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(_copy(reader, pod_writer))
                    group.create_task(_copy(pod_reader, writer))
            except* OSError:
                writer.transport.abort()
            finally:
                pod_writer.close()
                writer.close()
            return
        _log.debug("no ready pod for a connection")
        writer.close()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while piece := await source.read(PIECE_BYTES):
        sink.write(piece)
        await sink.drain()
    with contextlib.suppress(OSError):
        sink.write_eof()
