"""Sockets that servers listen on."""

from __future__ import annotations

import socket

import pytest

from flowprefill.errors import InvalidConfiguration
from flowprefill.hosting.listening import bound, port_of


def test_small_writes_on_accepted_connections_are_not_held_back() -> None:
    with bound("127.0.0.1", 0) as listening:
        listening.listen()
        listening.setblocking(True)
        with socket.create_connection(("127.0.0.1", port_of(listening))), listening.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_taken_port_is_named_with_what_to_do() -> None:
    with bound("127.0.0.1", 0) as first:
        first.listen()
        taken = f"cannot listen on 127.0.0.1:{port_of(first)}: Address already in use; give a free port"
        with pytest.raises(InvalidConfiguration, match=taken):
            bound("127.0.0.1", port_of(first))
