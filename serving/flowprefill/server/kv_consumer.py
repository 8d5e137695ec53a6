"""The decode pod's side of the KV transport: pulls blocks into its own. `kv_transfer.py` has the protocol."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from flowprefill.engines.protocol import Engine, EngineSpec
from flowprefill.errors import KVTransferFailed, reason_of
from flowprefill.metrics.engine import KVTransferMetrics
from flowprefill.server.kv_frames import (
    MAX_PAYLOAD_BYTES,
    Abort,
    Ack,
    Blocks,
    Layout,
    Message,
    Pull,
    Refused,
    layout_of,
    read_message,
    read_payload,
    send_message,
)
from flowprefill.server.kv_transfer import STREAM_LIMIT_BYTES, TransferLimits, in_thread, pieces
from flowprefill.wire import KVTransferParams

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """What one pull brought."""

    num_blocks: int
    num_bytes: int


class KVClient:
    """The consumer's side: pulls blocks into its own engine's blocks. Every failure is a `KVTransferFailed`."""

    def __init__(self, engine: Engine, metrics: KVTransferMetrics, *, limits: TransferLimits) -> None:
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
                        f"request {params.remote_request_id!r} was pulled: {reason_of(error)}"
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
                extra={"request_id": params.remote_request_id, "reason": reason_of(error)},
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
        for piece in pieces(local, header.blocks_per_piece):
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
