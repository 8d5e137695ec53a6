"""The parent's end of the channel: a socket, and messages on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path

from flowprefill.server.vllm.channel import FromCore, Parcel, Reconfigure, hang_up

log = logging.getLogger(__name__)

MAX_UNREAD = 256
"""Messages of a core that the event loop has not taken yet; then the socket fills, and then the core drops."""

JOIN_S = 5.0


class ParentChannel:
    """Listens for the engine core. A core that never comes, goes, or comes again is no error here."""

    def __init__(
        self,
        path: Path,
        on_message: Callable[[FromCore], None],
        *,
        on_connected: Callable[[], None] = lambda: None,
        on_loss: Callable[[int], None] = lambda num_lost: None,
    ) -> None:
        """`path` is the socket's, in a directory that only this user may enter.

        All others are called on the event loop: `on_connected` when a core comes, `on_loss` when it had to drop decisions.
        """
        self._on_message = on_message
        self._on_connected = on_connected
        self._on_loss = on_loss
        self._loop = asyncio.get_running_loop()
        self._key = secrets.token_bytes(32)
        self.address = str(path)
        self._listener = Listener(self.address, "AF_UNIX", backlog=4, authkey=self._key)
        self._lock = threading.Condition()
        self._closed = False
        self._latest: Reconfigure | None = None
        self._connections: set[Connection] = set()
        self._threads: set[threading.Thread] = set()
        self._accepting = threading.Thread(target=self._accept, name="channel-listener", daemon=True)
        self._accepting.start()

    @property
    def key(self) -> str:
        """What the core shows, in hex."""
        return self._key.hex()

    def send(self, message: Reconfigure) -> None:
        """Tell the core that is there, and any that comes later. Only the latest message counts."""
        with self._lock:
            self._latest = message
            self._lock.notify_all()

    async def close(self) -> None:
        """End connections and threads, remove the socket."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            for connection in self._connections:
                hang_up(connection)
        # Closing a socket does not wake who waits at it; a visitor does.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as visitor:
            visitor.connect(self.address)
        for thread in (self._accepting, *self._threads):
            await asyncio.to_thread(thread.join, JOIN_S)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except (AuthenticationError, EOFError, OSError) as error:
                if self._closed:
                    return
                log.warning("a visitor without the key", extra={"error": repr(error)})
                continue
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="channel-core", daemon=True
            )
            self._threads = {other for other in self._threads if other.is_alive()} | {thread}
            thread.start()

    def _serve(self, connection: Connection) -> None:
        """One core from its coming to its going. Both threads are done with the connection before it is closed."""
        self._cross(self._on_connected)
        writing = threading.Thread(
            target=self._write, args=(connection,), name="channel-settings", daemon=True
        )
        writing.start()
        try:
            self._read(connection)
        finally:
            with self._lock:
                self._connections.discard(connection)
                self._lock.notify_all()
            hang_up(connection)
            writing.join()
            connection.close()

    def _read(self, connection: Connection) -> None:
        room = threading.BoundedSemaphore(MAX_UNREAD)
        num_lost = 0

        def hear(parcel: Parcel) -> None:
            nonlocal num_lost
            try:
                if parcel.num_lost > num_lost:
                    self._on_loss(parcel.num_lost - num_lost)
                    num_lost = parcel.num_lost
                self._on_message(parcel.message)
            finally:
                room.release()

        try:
            while True:
                parcel = connection.recv()
                if not isinstance(parcel, Parcel):
                    raise TypeError(f"got {type(parcel).__name__}; accepted are parcels")
                while not room.acquire(timeout=1.0):
                    if self._closed:
                        return
                self._cross(partial(hear, parcel))
        except (EOFError, OSError):
            log.debug("the engine core has gone")
        except Exception:
            log.exception("the engine core sent what cannot be read")

    def _write(self, connection: Connection) -> None:
        sent: Reconfigure | None = None
        while True:
            with self._lock:
                while not self._closed and connection in self._connections and self._latest is sent:
                    self._lock.wait()
                if self._closed or connection not in self._connections:
                    return
                sent = self._latest
            try:
                connection.send(sent)
            except OSError:
                hang_up(connection)
                return

    def _cross(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens any more
            self._loop.call_soon_threadsafe(call)
