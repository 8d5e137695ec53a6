"""The KV transport's contract over real sockets: what arrives is what was held, or the pull fails and says why."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from flowprefill.engines.simulated.engine import SimulatedEngine
from flowprefill.errors import KVTransferFailed
from flowprefill.hosting.listening import bound, port_of
from flowprefill.metrics.engine import EngineMetrics, engine_metrics
from flowprefill.server import kv_producer
from flowprefill.server.holds import HoldTable
from flowprefill.server.kv_consumer import KVClient
from flowprefill.server.kv_producer import KVServer
from flowprefill.server.kv_transfer import TransferLimits
from flowprefill.wire import KVTransferParams
from support.pods import simulated_engine, until

NUM_TOKENS = 100  # 7 blocks of 16, the last one partly filled
BLOCKS = (5, 3, 9, 11, 2, 17, 30)
LIMITS = TransferLimits(connect_s=2.0, stall_s=5.0, pull_s=10.0, max_retries=0)


@dataclass(slots=True, kw_only=True)
class Side:
    engine: SimulatedEngine
    metrics: EngineMetrics

    def value(self, name: str, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(
            name, {"service": "s", "model_name": "m", "role": "r"} | labels
        )
        return found or 0.0


@dataclass(slots=True, kw_only=True)
class Pair:
    producer: Side
    consumer: Side
    holds: HoldTable
    ends: list[tuple[str, str]]
    client: KVClient
    port: int

    def params(self, **changes: Any) -> KVTransferParams:
        spec = self.producer.engine.spec
        body = {
            "remote_engine_id": "e",
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
            "remote_request_id": "req",
            "remote_block_ids": BLOCKS,
            "num_tokens": NUM_TOKENS,
            "block_size": spec.block_size,
            "dtype": spec.dtype,
            "num_layers": spec.num_layers,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "model": spec.model,
            "revision": spec.revision,
        }
        return KVTransferParams.model_validate(body | changes)


def side() -> Side:
    return Side(
        engine=simulated_engine(num_kv_blocks=64),
        metrics=engine_metrics(CollectorRegistry(), service="s", model_name="m", role="r", classes=["chat"]),
    )


@asynccontextmanager
async def pair(*, lease_s: float = 60.0, limits: TransferLimits = LIMITS) -> AsyncIterator[Pair]:
    """A producer that holds request `req`, whose blocks have random content, and a consumer."""
    producer, consumer = side(), side()
    ends: list[tuple[str, str]] = []
    holds = HoldTable(lambda request_id, reason: ends.append((request_id, reason)), lease_s=lease_s)
    content = np.random.default_rng(7).integers(
        0, 256, 7 * producer.engine.spec.kv_block_bytes, dtype=np.uint8
    )
    producer.engine.write_blocks(BLOCKS, memoryview(content.tobytes()))
    holds.add("req", BLOCKS)
    server = KVServer(producer.engine, holds, producer.metrics.kv_transfer, limits=limits)
    at = bound("127.0.0.1", 0)
    port = port_of(at)
    await server.start(at)
    client = KVClient(consumer.engine, consumer.metrics.kv_transfer, limits=limits)
    try:
        yield Pair(producer=producer, consumer=consumer, holds=holds, ends=ends, client=client, port=port)
    finally:
        await server.close()


async def test_a_pull_that_went_well_leaves_nothing_to_tell(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        async with pair() as p:
            await p.client.pull(p.params(), skip_blocks=0, local_block_ids=range(7))
            await p.client.release(p.params(), pulled=True)
    assert caplog.messages == []


async def test_pulled_blocks_are_the_held_ones_and_are_counted() -> None:
    async with pair() as p:
        local = (40, 41, 42, 43, 44, 45, 46)
        pulled = await p.client.pull(p.params(), skip_blocks=0, local_block_ids=local)
        assert bytes(p.consumer.engine.read_blocks(local)) == bytes(p.producer.engine.read_blocks(BLOCKS))
        size = 7 * p.producer.engine.spec.kv_block_bytes
        assert (pulled.num_blocks, pulled.num_bytes) == (7, size)
        assert p.consumer.value("flowprefill_kv_transfer_received_bytes_total") == size
        assert p.consumer.value("flowprefill_kv_transfer_received_tokens_total") == NUM_TOKENS
        assert p.producer.value("flowprefill_kv_transfer_sent_bytes_total") == size
        assert p.ends == []  # held until acknowledged
        assert await p.client.release(p.params(), pulled=True)
        assert p.ends == [("req", "pulled")]


async def test_blocks_in_many_pieces_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as p:
        monkeypatch.setattr(kv_producer, "PIECE_BYTES", 2 * p.producer.engine.spec.kv_block_bytes + 1)
        local = (1, 2, 3, 4, 5, 6, 7)
        await p.client.pull(p.params(), skip_blocks=0, local_block_ids=local)
        assert bytes(p.consumer.engine.read_blocks(local)) == bytes(p.producer.engine.read_blocks(BLOCKS))


async def test_cached_blocks_are_skipped() -> None:
    async with pair() as p:
        await p.client.pull(p.params(), skip_blocks=5, local_block_ids=(1, 2))
        assert bytes(p.consumer.engine.read_blocks((1, 2))) == bytes(
            p.producer.engine.read_blocks(BLOCKS[5:])
        )
        assert p.consumer.value("flowprefill_kv_transfer_received_tokens_total") == NUM_TOKENS - 5 * 16


async def test_a_pull_can_be_repeated_until_it_is_acknowledged() -> None:
    async with pair() as p:
        for _ in range(2):
            await p.client.pull(p.params(), skip_blocks=0, local_block_ids=range(7))
        await p.client.release(p.params(), pulled=True)
        with pytest.raises(KVTransferFailed, match="no KV is held"):
            await p.client.pull(p.params(), skip_blocks=0, local_block_ids=range(7))
        assert p.consumer.value("flowprefill_kv_transfer_failures_total", reason="unknown_request") == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "bfloat16"),
        ("revision", "other"),
        ("model", "other"),
        ("block_size", 32),
        ("num_layers", 2),
        ("num_kv_heads", 2),
        ("head_dim", 64),
    ],
)
async def test_kv_of_another_layout_is_refused_with_both_values(field: str, value: Any) -> None:
    async with pair() as p:
        with pytest.raises(KVTransferFailed) as caught:
            p.client.check(p.params(**{field: value}))
        assert field in str(caught.value)
        assert repr(value) in str(caught.value)
        assert p.consumer.value("flowprefill_kv_transfer_failures_total", reason="layout_mismatch") == 1


@pytest.mark.parametrize(
    ("num_tokens", "blocks"), [(113, BLOCKS), (96, BLOCKS), (0, ()), (NUM_TOKENS, BLOCKS[:-1])]
)
async def test_a_number_of_blocks_that_does_not_fit_the_tokens_is_refused(
    num_tokens: int, blocks: tuple[int, ...]
) -> None:
    async with pair() as p:
        with pytest.raises(KVTransferFailed, match="blocks"):
            p.client.check(p.params(num_tokens=num_tokens, remote_block_ids=blocks))


async def test_the_producer_checks_the_consumers_layout_as_well() -> None:
    async with pair() as p:
        other = simulated_engine(num_kv_blocks=64, revision="1")
        client = KVClient(other, p.consumer.metrics.kv_transfer, limits=LIMITS)
        with pytest.raises(KVTransferFailed, match="revision: '0' here, '1' there"):
            await client.pull(p.params(), skip_blocks=0, local_block_ids=range(7))
        assert p.producer.value("flowprefill_kv_transfer_failures_total", reason="layout_mismatch") == 1


async def test_blocks_that_the_request_does_not_hold_are_not_sent() -> None:
    async with pair() as p:
        for blocks in ((5, 3, 9, 11, 2, 17, 31), (5, 5, 9, 11, 2, 17, 30)):
            with pytest.raises(KVTransferFailed, match="blocks"):
                await p.client.pull(
                    p.params(remote_block_ids=blocks), skip_blocks=0, local_block_ids=range(7)
                )
        assert p.producer.value("flowprefill_kv_transfer_sent_bytes_total") == 0


async def test_an_unknown_request_is_an_error() -> None:
    async with pair() as p:
        with pytest.raises(KVTransferFailed, match="no KV is held for request 'nobody'"):
            await p.client.pull(p.params(remote_request_id="nobody"), skip_blocks=0, local_block_ids=range(7))


async def test_an_expired_request_is_an_error() -> None:
    async with pair(lease_s=0.01) as p:
        await p.holds.wait_empty()
        with pytest.raises(KVTransferFailed, match="lease"):
            await p.client.pull(p.params(), skip_blocks=0, local_block_ids=range(7))
        assert p.ends == [("req", "expired")]


async def test_an_aborted_request_is_an_error_and_frees_at_once() -> None:
    async with pair() as p:
        assert await p.client.release(p.params(), pulled=False)
        assert p.ends == [("req", "aborted")]
        with pytest.raises(KVTransferFailed, match="aborted"):
            await p.client.pull(p.params(), skip_blocks=0, local_block_ids=range(7))


async def test_a_producer_that_is_not_there_is_an_error() -> None:
    async with pair() as p:
        pass
    with pytest.raises(KVTransferFailed, match="was lost"):
        await p.client.pull(p.params(), skip_blocks=0, local_block_ids=range(7))
    assert p.consumer.value("flowprefill_kv_transfer_failures_total", reason="connection_lost") == 1
    assert not await p.client.release(p.params(), pulled=False)


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def false_producer(script: Script) -> AsyncIterator[int]:
    """Something on a port that is not our producer, or is one that dies."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()


def frame(kind: int, body: bytes, *, magic: bytes = b"FPKV", length: int | None = None) -> bytes:
    return struct.pack(">4sBI", magic, kind, len(body) if length is None else length) + body


def message(**fields: Any) -> bytes:
    return frame(1, json.dumps(fields).encode())


def says(*parts: bytes) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(64)
        for part in parts:
            writer.write(part)
        await writer.drain()

    return script


BLOCK = 2 * 16 * 8
HEADER = message(type="blocks", num_blocks=7, blocks_per_piece=4, block_bytes=BLOCK)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((), "lost"),
        ((HEADER,), "lost"),
        ((HEADER, frame(2, b"x" * 4 * BLOCK), frame(2, b"x" * 100, length=3 * BLOCK)), "lost"),
        ((HEADER, frame(2, b"x" * 4 * BLOCK), frame(2, b"x" * 2 * BLOCK)), f"{3 * BLOCK} bytes"),
        ((HEADER, frame(2, b"x" * 4 * BLOCK, magic=b"HTTP")), "out of step"),
        ((b"HTTP/1.1 400 Bad Request\r\n\r\n",), "out of step"),
        ((frame(1, b"{}", length=2**21),), "at most"),
        ((frame(1, b"\xff\xfe"),), "shape"),
        ((frame(1, b"[]"),), "shape"),
        ((message(type="blocks", num_blocks=6, blocks_per_piece=4, block_bytes=BLOCK),), "6 blocks"),
        (
            (message(type="blocks", num_blocks=7, blocks_per_piece=4, block_bytes=BLOCK + 1),),
            f"{BLOCK + 1} bytes",
        ),
        ((message(type="blocks", num_blocks=7, blocks_per_piece=0, block_bytes=BLOCK),), "shape"),
        ((message(type="blocks", num_blocks=7, blocks_per_piece=2**40, block_bytes=BLOCK),), "limit"),
        ((message(type="ack", request_id="x"),), "'ack'"),
        (
            (HEADER, message(type="refused", reason="engine_failed", message="memory is gone")),
            "memory is gone",
        ),
    ],
)
async def test_a_stream_that_is_cut_or_wrong_is_an_error(parts: tuple[bytes, ...], words: str) -> None:
    async with pair() as p, false_producer(says(*parts)) as port:
        with pytest.raises(KVTransferFailed, match=words):
            await p.client.pull(p.params(remote_port=port), skip_blocks=0, local_block_ids=range(7))
        assert p.consumer.value("flowprefill_kv_transfer_received_tokens_total") == 0


async def test_a_producer_that_falls_silent_is_an_error() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the consumer gives up

    limits = TransferLimits(connect_s=1.0, stall_s=0.05, pull_s=1.0, max_retries=0)
    async with pair(limits=limits) as p, false_producer(silent) as port:
        with pytest.raises(KVTransferFailed, match="was lost"):
            await p.client.pull(p.params(remote_port=port), skip_blocks=0, local_block_ids=range(7))


async def test_a_broken_connection_is_tried_again_as_often_as_configured() -> None:
    async with pair() as p:
        attempts = 0

        async def breaks_twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal attempts
            attempts += 1
            if attempts > 2:
                real_reader, real_writer = await asyncio.open_connection("127.0.0.1", p.port)
                await asyncio.gather(copy(reader, real_writer), copy(real_reader, writer))

        limits = TransferLimits(connect_s=1.0, stall_s=5.0, pull_s=5.0, max_retries=2)
        client = KVClient(p.consumer.engine, p.consumer.metrics.kv_transfer, limits=limits)
        async with false_producer(breaks_twice) as port:
            await client.pull(p.params(remote_port=port), skip_blocks=0, local_block_ids=range(7))
        assert attempts == 3
        assert p.consumer.value("flowprefill_kv_transfer_failures_total", reason="connection_lost") == 2
        assert bytes(p.consumer.engine.read_blocks(range(7))) == bytes(p.producer.engine.read_blocks(BLOCKS))


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        frame(1, b"", length=2**31),
        frame(1, b"\xff"),
        frame(2, b"xx"),
        message(type="blocks", num_blocks=1, blocks_per_piece=1, block_bytes=1),
        message(type="pull", request_id="req", block_ids="all", layout={}),
        message(type="ack", request_id="x" * 1000),
    ],
)
async def test_a_consumer_that_sends_garbage_is_told_and_the_producer_lives(garbage: bytes) -> None:
    async with pair() as p:
        reader, writer = await asyncio.open_connection("127.0.0.1", p.port)
        writer.write(garbage)
        answer = await reader.read()  # until the producer closes
        writer.close()
        assert b'"refused"' in answer
        await p.client.pull(p.params(), skip_blocks=0, local_block_ids=range(7))
        assert p.ends == []


async def test_a_consumer_that_dies_while_it_pulls_leaves_the_blocks_held() -> None:
    async with pair() as p:
        reader, writer = await asyncio.open_connection("127.0.0.1", p.port)
        layout = {
            name: getattr(p.params(), name)
            for name in ("model", "revision", "dtype", "block_size", "num_layers", "num_kv_heads", "head_dim")
        }
        writer.write(message(type="pull", request_id="req", block_ids=list(BLOCKS), layout=layout))
        await reader.readexactly(9)
        writer.transport.abort()
        await p.client.pull(p.params(), skip_blocks=0, local_block_ids=range(7))
        assert p.ends == []


async def test_a_cancelled_pull_returns_only_when_nobody_writes_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import threading

    async with pair() as p:
        entered, leave = threading.Event(), threading.Event()
        write = p.consumer.engine.write_blocks

        def slow_write(block_ids: Any, data: memoryview) -> None:
            entered.set()
            leave.wait(10)
            write(block_ids, data)

        monkeypatch.setattr(p.consumer.engine, "write_blocks", slow_write)
        pull = asyncio.ensure_future(p.client.pull(p.params(), skip_blocks=0, local_block_ids=range(7)))
        await until(entered.is_set)
        pull.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not pull.done()
        leave.set()
        with pytest.raises(asyncio.CancelledError):
            await pull
        assert bytes(p.consumer.engine.read_blocks(range(7))) == bytes(p.producer.engine.read_blocks(BLOCKS))
