"""A TCP relay in the test's event loop, in front of a server whose connection is to fail as real ones do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

HOST = "127.0.0.1"


class Relay:
    """Relays bytes until told otherwise. `port` is where clients connect."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Accept connections, on the same port as before."""
        self._server = await asyncio.start_server(self._relay, HOST, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Reset every connection and refuse new ones, as a server that is gone."""
        if self._server is not None:
            self._server.close()
        self._abort()
        self._server = None

    def silence(self) -> None:
        """Nothing passes any more on connections that stay open, as when a NAT forgot them; new ones pass."""
        self._flows = asyncio.Event()

    def resume(self) -> None:
        """New connections pass bytes again; silent ones stay silent."""
        self._flows = asyncio.Event()
        self._flows.set()

    def _abort(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        flows = self._flows
        try:
            there, back = await asyncio.open_connection(HOST, self._target_port)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, back}
        self._writers |= pair
        try:
            await asyncio.gather(self._pump(reader, back, flows), self._pump(there, writer, flows))
        finally:
            self._writers -= pair
            for each in pair:
                each.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flows: asyncio.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                # `silence` puts another event in place: what was open before waits for ever.
                if flows is not self._flows:
                    await asyncio.Event().wait()
                await flows.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@asynccontextmanager
async def relaying(target_port: int) -> AsyncIterator[Relay]:
    relay = Relay(target_port)
    await relay.start()
    try:
        yield relay
    finally:
        await relay.cut()
