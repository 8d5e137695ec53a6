"""One end of a connection between the engine core and a rank: whole messages over a Unix stream socket.

Messages are pickles: both ends are processes of one engine, and each has seen by the kernel's word who the other is (`gathering.py`).
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("!Q")
MAX_MESSAGE_BYTES = 2**30
"""A step's outputs are megabytes at most (prompt log probabilities)."""


class Link:
    """Any thread may `send`; one thread reads."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._stream = connection.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a message. What goes to an end that has gone is dropped: its `received` tells."""
        self.send_packed(pack(message))

    def send_packed(self, packed: bytes) -> None:
        """As `send`, for a message that goes to several."""
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(packed)

    def received(self) -> Iterator[Any]:
        """Messages until the other end, or this one, is closed."""
        with contextlib.suppress(EOFError, OSError, ValueError):
            while True:
                yield self.first()

    def first(self) -> Any:
        """The next message. Raises EOFError when there is none, and OSError or ValueError once closed."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        assert length <= MAX_MESSAGE_BYTES, f"a message of {length} bytes; the most is {MAX_MESSAGE_BYTES}"
        return pickle.loads(self._exactly(length))

    def _exactly(self, num_bytes: int) -> bytes:
        found = self._stream.read(num_bytes)
        if len(found) < num_bytes:
            raise EOFError
        return found

    def close(self) -> None:
        """End both directions; the reading thread's iteration ends. Any thread, more than once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def pack(message: Any) -> bytes:
    """The bytes of a message on the wire."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body
