"""KV blocks from a prefill pod to a decode pod over one socket per pull.

    consumer                         producer
    pull(request, blocks, layout) ─▶ checks: held? same layout? these blocks?
                  ◀─ blocks(count, piece size) or refused(reason)
                  ◀─ payload, payload, ...     read from the engine piece by piece
    ack(request) ─▶                            the hold ends, the blocks return to the producer's pool
                  ◀─ released                  (`abort` likewise; either may use a connection of its own)

Anything that breaks before `ack` leaves the blocks held until the lease ends, so a consumer may try
again. Blocks are `[layer, 2, block, block_size, kv_heads, head_dim]` per piece. Copies to and from the engine run
in threads; memory per pull is bounded by a few pieces.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from flowprefill.engines.protocol import Engine, EngineSpec
from flowprefill.errors import KVTransferFailed
from flowprefill.metrics.engine import KVTransferMetrics
from flowprefill.server.holds import HoldTable
from flowprefill.server.kv_frames import (
    MAX_PAYLOAD_BYTES,
    PIECE_BYTES,
    Abort,
    Ack,
    Blocks,
    Layout,
    Message,
    Pull,
    Refused,
    Released,
    layout_of,
    read_message,
    read_payload,
    send_message,
    send_payload,
)
from flowprefill.wire import KVTransferParams

log = logging.getLogger(__name__)

T = TypeVar("T")

STREAM_LIMIT_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """Time limits in seconds: of a connection attempt, of the wait for one frame, of a whole pull.

    A pull whose connection breaks is repeated `max_retries` times; a refusal is final.
    """

    connect_s: float = 5.0
    stall_s: float = 30.0
    pull_s: float = 30.0
    max_retries: int = 1
    max_connections: int = 256


class KVServer:
    """The producer's side: serves pulls of held blocks."""

    def __init__(
        self,
        engine: Engine,
        holds: HoldTable,
        metrics: KVTransferMetrics,
        *,
        limits: TransferLimits = TransferLimits(),
    ) -> None:
        self._engine = engine
        self._layout = layout_of(engine.spec)
        self._holds = holds
        self._metrics = metrics
        self._limits = limits
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port in use (`port` 0 picks a free one)."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=STREAM_LIMIT_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and end the connections."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= self._limits.max_connections:
            writer.close()
            return
        self._connections.add(task)
        try:
            await self._answer_all(reader, writer)
        except (OSError, EOFError, TimeoutError) as error:
            log.info("KV connection lost", extra={"reason": _reason(error)})
        except KVTransferFailed as error:
            log.warning("KV connection ended", extra={"reason": str(error)})
            await _try_to_tell(writer, Refused(reason="bad_message", message=str(error)))
        except asyncio.CancelledError:
            pass  # close() ends connections; the stream protocol logs a cancelled handler as an error
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer messages until the consumer closes or stays silent for the stall time."""
        while True:
            async with asyncio.timeout(self._limits.stall_s):
                message = await read_message(reader)
            match message:
                case Pull():
                    await self._send_blocks(message, writer)
                case Ack():
                    known = self._holds.end(message.request_id, "pulled")
                    await send_message(writer, Released(known=known))
                case Abort():
                    known = self._holds.end(message.request_id, "aborted")
                    await send_message(writer, Released(known=known))
                case _:
                    raise KVTransferFailed(f"a consumer sent {message.type!r}; accepted are pull, ack, abort")

    async def _send_blocks(self, pull: Pull, writer: asyncio.StreamWriter) -> None:
        with self._holds.reading(pull.request_id) as held:
            refusal = self._refusal(pull, held)
            if refusal is not None:
                self._metrics.failed(refusal.reason)
                await send_message(writer, refusal)
                return
            block_bytes = self._engine.spec.kv_block_bytes
            per_piece = max(1, PIECE_BYTES // block_bytes)
            header = Blocks(
                num_blocks=len(pull.block_ids), blocks_per_piece=per_piece, block_bytes=block_bytes
            )
            await send_message(writer, header)
            for piece in _pieces(pull.block_ids, per_piece):
                try:
                    data = await in_thread(partial(self._engine.read_blocks, piece))
                except Exception as error:
                    log.exception("KV blocks could not be read", extra={"request_id": pull.request_id})
                    self._metrics.failed("engine_failed")
                    await send_message(writer, Refused(reason="engine_failed", message=_reason(error)))
                    return
                async with asyncio.timeout(self._limits.stall_s):
                    await send_payload(writer, data.cast("B") if data.format != "B" else data)
                self._metrics.sent(data.nbytes)

    def _refusal(self, pull: Pull, held: tuple[int, ...] | None) -> Refused | None:
        if held is None:
            return Refused(
                reason="unknown_request",
                message=f"no KV is held for request {pull.request_id!r}: it was pulled, aborted, or its lease ended",
            )
        if differences := self._layout.differences(pull.layout):
            return Refused(reason="layout_mismatch", message=f"KV layouts differ: {differences}")
        strangers = set(pull.block_ids) - set(held)
        if strangers or len(set(pull.block_ids)) != len(pull.block_ids):
            return Refused(
                reason="wrong_blocks",
                message=f"blocks {sorted(strangers)[:8]} are not (or twice) among the {len(held)} held blocks",
            )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """What one pull brought."""

    num_blocks: int
    num_bytes: int


class KVClient:
    """The consumer's side: pulls blocks into its own engine's blocks. Every failure is a `KVTransferFailed`."""

    def __init__(
        self, engine: Engine, metrics: KVTransferMetrics, *, limits: TransferLimits = TransferLimits()
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._limits = limits

    def check(self, params: KVTransferParams) -> None:
        """Raise `KVTransferFailed` when the producer's blocks cannot be used here, naming the values."""
        here, there = layout_of(self._engine.spec), _layout_in(params)
        if differences := here.differences(there):
            self._metrics.failed("layout_mismatch")
            raise KVTransferFailed(
                f"KV of request {params.remote_request_id!r} cannot be used: {differences}"
            )
        needed = -(-params.num_tokens // params.block_size)
        if params.num_tokens < 1 or len(params.remote_block_ids) != needed:
            self._metrics.failed("wrong_blocks")
            raise KVTransferFailed(
                f"{len(params.remote_block_ids)} blocks of {params.block_size} tokens came for "
                f"{params.num_tokens} tokens; expected are {needed} blocks"
            )

    async def pull(
        self, params: KVTransferParams, *, skip_blocks: int, local_block_ids: Sequence[int]
    ) -> Pulled:
        """Fill `local_block_ids` with the request's blocks from number `skip_blocks` on.

        `check` has passed. On failure the local blocks hold anything. The producer holds its own until `release`.
        A cancelled pull returns only when no thread writes the local blocks any more.
        """
        remote = params.remote_block_ids[skip_blocks:]
        assert len(remote) == len(local_block_ids), (len(remote), len(local_block_ids))
        if not remote:
            return Pulled(num_blocks=0, num_bytes=0)
        began_s = time.monotonic()
        for attempts_left in range(self._limits.max_retries, -1, -1):
            try:
                num_bytes = await self._attempt(params, remote, local_block_ids)
                break
            except KVTransferFailed as error:
                self._metrics.failed(error.reason if isinstance(error, _Refusal) else "bad_message")
                raise
            except (OSError, EOFError, TimeoutError) as error:
                self._metrics.failed("connection_lost")
                if not attempts_left:
                    raise KVTransferFailed(
                        f"the prefill pod at {params.remote_host}:{params.remote_port} was lost while KV of "
                        f"request {params.remote_request_id!r} was pulled: {_reason(error)}"
                    ) from None
        num_tokens = params.num_tokens - skip_blocks * params.block_size
        self._metrics.pulled(num_tokens, time.monotonic() - began_s)
        return Pulled(num_blocks=len(remote), num_bytes=num_bytes)

    async def _attempt(self, params: KVTransferParams, remote: Sequence[int], local: Sequence[int]) -> int:
        async with asyncio.timeout(self._limits.pull_s), self._connection(params) as (reader, writer):
            return await self._receive(params, remote, local, reader, writer)

    async def release(self, params: KVTransferParams, *, pulled: bool) -> bool:
        """Tell the producer that its blocks may go: all is in place here, or nobody will pull.

        Best effort (the lease is the safety net): False when it could not be told.
        """
        message = (Ack if pulled else Abort)(request_id=params.remote_request_id)
        try:
            async with self._connection(params) as (reader, writer):
                await self._exchange(reader, writer, message)
        except (OSError, EOFError, TimeoutError, KVTransferFailed) as error:
            log.info(
                "the prefill pod was not told that its KV may go; the lease will end the hold",
                extra={"request_id": params.remote_request_id, "reason": _reason(error)},
            )
            return False
        return True

    async def _receive(
        self,
        params: KVTransferParams,
        remote: Sequence[int],
        local: Sequence[int],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> int:
        spec = self._engine.spec
        pull = Pull(request_id=params.remote_request_id, block_ids=list(remote), layout=layout_of(spec))
        header = await self._exchange(reader, writer, pull)
        if not isinstance(header, Blocks):
            raise KVTransferFailed(f"the producer answered {header.type!r} to a pull; expected is 'blocks'")
        _check_header(header, spec, len(remote))
        received = 0
        for piece in _pieces(local, header.blocks_per_piece):
            async with asyncio.timeout(self._limits.stall_s):
                data = await read_payload(reader, len(piece) * spec.kv_block_bytes)
            if isinstance(data, Refused):
                raise _Refusal(data)
            await in_thread(partial(self._engine.write_blocks, piece, memoryview(data)))
            received += len(data)
            self._metrics.received(len(data))
        return received

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: Message
    ) -> Message:
        """Send and await the answer; a refusal raises."""
        async with asyncio.timeout(self._limits.stall_s):
            await send_message(writer, message)
            answer = await read_message(reader)
        if isinstance(answer, Refused):
            raise _Refusal(answer)
        return answer

    @asynccontextmanager
    async def _connection(
        self, params: KVTransferParams
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        async with asyncio.timeout(self._limits.connect_s):
            reader, writer = await asyncio.open_connection(
                params.remote_host, params.remote_port, limit=STREAM_LIMIT_BYTES
            )
        try:
            yield reader, writer
        finally:
            writer.close()


class _Refusal(KVTransferFailed):
    """The producer said no; `reason` is a value of the failure counter's closed set."""

    def __init__(self, answer: Refused) -> None:
        super().__init__(f"the prefill pod refused to send KV: {answer.message}")
        self.reason = answer.reason


def _check_header(header: Blocks, spec: EngineSpec, num_blocks: int) -> None:
    if header.num_blocks != num_blocks or header.block_bytes != spec.kv_block_bytes:
        raise KVTransferFailed(
            f"the producer offers {header.num_blocks} blocks of {header.block_bytes} bytes; "
            f"expected are {num_blocks} of {spec.kv_block_bytes}"
        )
    if header.blocks_per_piece * header.block_bytes > max(MAX_PAYLOAD_BYTES, header.block_bytes):
        raise KVTransferFailed(f"pieces of {header.blocks_per_piece} blocks are above the limit of 1 GiB")


def _layout_in(params: KVTransferParams) -> Layout:
    return Layout(**{name: getattr(params, name) for name in Layout.model_fields})


def _pieces(block_ids: Sequence[int], size: int) -> list[Sequence[int]]:
    return [block_ids[at : at + size] for at in range(0, len(block_ids), size)]


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread. Cancelled, it still waits for the thread: blocks must not change hands before."""
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


async def _try_to_tell(writer: asyncio.StreamWriter, message: Message) -> None:
    try:
        async with asyncio.timeout(1.0):
            await send_message(writer, message)
    except (OSError, TimeoutError) as error:
        log.debug("KV error not delivered", extra={"reason": _reason(error)})


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
