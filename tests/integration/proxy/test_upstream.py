"""Connections to pods: a node that is gone is noticed, however long its pods may compute."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from flowprefill.proxy.upstream import new_client
from flowprefill.wire import Endpoint
from support.proxy_pods import HOST, FakeDecode, serving
from support.proxy_under_test import running_proxy


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


async def test_pods_that_die_one_after_the_other_under_a_request_are_a_503_to_be_tried_again(
    tmp_path: Path,
) -> None:
    num_legs = 0

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_legs
        num_legs += (await reader.readline()).startswith(b"POST")
        writer.transport.abort()

    decode = FakeDecode(name="d0")
    async with serving(decode.app()) as decode.address:
        servers = [await asyncio.start_server(die, HOST, 0) for _ in range(2)]
        addresses = ["{}:{}".format(*server.sockets[0].getsockname()[:2]) for server in servers]
        pods = [
            Endpoint(name=f"p{i}", role="prefill", revision="r1", address=address, admin=address)
            for i, address in enumerate(addresses)
        ]
        async with running_proxy(tmp_path, [*pods, decode.endpoint()]) as running:
            answer = await running.complete()
            assert answer.status_code == 503, answer.text
            assert int(answer.headers["retry-after"]) >= 1
            assert num_legs == 2
        for server in servers:
            server.close()
