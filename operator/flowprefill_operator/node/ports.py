"""Free TCP ports of this machine."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """`count` different ports that nobody listens on now. Another process may still take one before we do."""
    with contextlib.ExitStack() as open_sockets:
        ports = []
        for _ in range(count):
            probe = open_sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            probe.bind((address, 0))
            ports.append(int(probe.getsockname()[1]))
        return ports


def all_free(ports: Iterable[int], address: str = "127.0.0.1") -> bool:
    """Whether every one of `ports` could be listened on now."""
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                return False
    return True
