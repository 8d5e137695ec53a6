"""One port that leads to the ready pods."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from flowprefill_operator.node.forward import Forwarder
from flowprefill_operator.node.ports import all_free, free_ports


@contextlib.asynccontextmanager
async def pod(name: str) -> AsyncIterator[tuple[str, int]]:
    """A pod that answers each line with its name and the line."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(f"{name}:".encode() + line)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield "127.0.0.1", server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def ask(port: int, *lines: str) -> list[str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answers = []
    for line in lines:
        writer.write(line.encode() + b"\n")
        answers.append((await reader.readline()).decode().strip())
    writer.close()
    return answers


async def test_connections_take_turns_and_each_stays_with_its_pod() -> None:
    async with pod("a") as a, pod("b") as b:
        forwarder = Forwarder(lambda: [a, b])
        port = await forwarder.listen("127.0.0.1", 0)
        seen = [await ask(port, "1", "2") for _ in range(4)]
        await forwarder.close()
    assert seen == [["a:1", "a:2"], ["b:1", "b:2"]] * 2


async def test_a_pod_that_went_away_unnoticed_is_passed_over() -> None:
    async with pod("a") as a:
        gone = ("127.0.0.1", free_ports(1)[0])
        forwarder = Forwarder(lambda: [gone, a])
        port = await forwarder.listen("127.0.0.1", 0)
        assert [await ask(port, "x") for _ in range(3)] == [["a:x"]] * 3
        await forwarder.close()


async def test_without_a_pod_the_connection_ends() -> None:
    forwarder = Forwarder(list)
    port = await forwarder.listen("127.0.0.1", 0)
    with contextlib.suppress(ConnectionResetError):  # as good an end
        assert await ask(port, "x") == [""]
    await forwarder.close()


async def test_a_connection_outlives_its_pods_place_in_the_list() -> None:
    async with pod("a") as a, pod("b") as b:
        backends = [a]
        forwarder = Forwarder(lambda: backends)
        port = await forwarder.listen("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"1\n")
        assert await reader.readline() == b"a:1\n"
        backends[:] = [b]
        writer.write(b"2\n")
        assert await reader.readline() == b"a:2\n"
        assert await ask(port, "3") == ["b:3"]
        writer.close()
        await forwarder.close()


async def test_a_client_that_leaves_is_noticed_by_the_pod() -> None:
    left = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        left.set()
        writer.close()

    server = await asyncio.start_server(wait, "127.0.0.1", 0)
    forwarder = Forwarder(lambda: [("127.0.0.1", server.sockets[0].getsockname()[1])])
    port = await forwarder.listen("127.0.0.1", 0)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()
    await asyncio.wait_for(left.wait(), 30)
    await forwarder.close()
    server.close()


async def test_a_taken_port_is_an_error_and_free_ports_are_free() -> None:
    first, second = Forwarder(list), Forwarder(list)
    port = await first.listen("127.0.0.1", 0)
    with pytest.raises(OSError):
        await second.listen("127.0.0.1", port)
    assert not all_free([port])
    await first.close()
    chosen = free_ports(20)
    assert len(set(chosen)) == 20
    assert all_free(chosen)
