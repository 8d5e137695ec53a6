"""How the ranks of an engine come to its core: by a Unix socket without a file, and the kernel's word on who calls.

The core listens on an abstract address that it makes up, tells it to the ranks by vLLM's own RPC, and takes one connection from each
process that it has started. With the first message the core hands the shared page on, as a descriptor. Nothing of it has a name in a
file system, so nothing is left when a process is killed.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from flowprefill.errors import EngineFailed
from flowprefill.server.vllm.ranks.link import Link
from flowprefill.server.vllm.ranks.messages import Ready
from flowprefill.server.vllm.ranks.page import Page, PageShape, new_page

GATHER_TIMEOUT_S = 120.0
"""How long the ranks may take to come, in all."""

_PEER = struct.Struct("3i")
_MAX_WELCOME_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """All ranks, in order, and the page they share."""

    links: Sequence[Link]
    page: Page
    ready: Sequence[Ready]


class Meeting:
    """The core's listening end."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0flowprefill-{secrets.token_hex(16)}")
        self._socket.listen()
        self._socket.settimeout(GATHER_TIMEOUT_S)

    @property
    def address(self) -> str:
        """What ranks call."""
        name: bytes = self._socket.getsockname()
        return name[1:].decode()

    def gather(self, processes: Mapping[int, int], num_slots: int) -> Gathering:
        """Wait for the ranks; `processes` gives the rank of each process id.

        Raises EngineFailed when a rank does not come, or one is not made like the others.
        """
        shape = PageShape(num_slots=num_slots, num_ranks=len(processes))
        with ExitStack() as undo, self._socket:
            page, descriptor = new_page(shape)
            undo.callback(page.close)
            found: dict[int, Link] = {}
            opened: list[socket.socket] = []
            try:
                while len(found) < len(processes):
                    rank, connection = self._accept(processes, sorted(processes.values() - found.keys()))
                    undo.callback(connection.close)
                    connection.settimeout(GATHER_TIMEOUT_S)
                    opened.append(connection)
                    socket.send_fds(connection, [pickle.dumps(shape)], [descriptor])
                    found[rank] = Link(connection)
            finally:
                os.close(descriptor)
            links = [found[rank] for rank in sorted(found)]
            ready = [_ready(rank, link) for rank, link in enumerate(links)]
            for other in ready[1:]:
                if (other.num_slots, other.num_points) != (ready[0].num_slots, ready[0].num_points):
                    raise EngineFailed(f"the ranks differ: {ready[0]} and {other}; accepted are equal ones")
            for connection in opened:
                connection.settimeout(None)
            undo.pop_all()
        return Gathering(links=links, page=page, ready=ready)

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()

    def _accept(self, processes: Mapping[int, int], missing: Sequence[int]) -> tuple[int, socket.socket]:
        while True:
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                raise EngineFailed(f"ranks {missing} did not come in {GATHER_TIMEOUT_S:.0f} s") from None
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            rank = processes.get(_PEER.unpack(peer)[0])
            if rank is not None and rank in missing:
                return rank, connection
            connection.close()  # no process of ours


def join(address: str) -> tuple[Link, Page]:
    """A rank's way in."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(GATHER_TIMEOUT_S)
    connection.connect("\0" + address)
    welcome, (descriptor,), _, _ = socket.recv_fds(connection, _MAX_WELCOME_BYTES, 1)
    try:
        page = Page(pickle.loads(welcome), descriptor)
    finally:
        os.close(descriptor)
    connection.settimeout(None)
    return Link(connection), page


def _ready(rank: int, link: Link) -> Ready:
    first = link.first()
    if not isinstance(first, Ready) or first.rank != rank:
        raise EngineFailed(f"rank {rank} began with {first!r}; accepted is its Ready")
    return first
