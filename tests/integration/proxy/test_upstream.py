"""Connections to pods: a node that is gone is noticed, however long its pods may compute."""

from __future__ import annotations

import socket

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from flowprefill.proxy.upstream import new_client
from support.proxy_pods import serving


async def test_a_connection_without_a_word_is_probed_and_counts_as_dead_within_half_a_minute() -> None:
    app = Starlette(routes=[Route("/", lambda request: Response("ok"))])
    async with serving(app) as address, new_client(max_connections=4, connect_timeout_s=1.0) as http:
        async with http.stream("GET", f"http://{address}/") as response:
            opened: socket.socket = response.extensions["network_stream"].get_extra_info("socket")

            def option(name: str) -> int:
                return opened.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))

            assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            silent_s = option("TCP_KEEPIDLE") + option("TCP_KEEPINTVL") * option("TCP_KEEPCNT")
            assert silent_s <= 30
            assert response.status_code == 200
        assert http.timeout.read is None, "a pod may compute for as long as it needs"
