"""The prefill pod's side of the KV transport: serves pulls of held blocks. `kv_transfer.py` has the protocol."""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial

from flowprefill.engines.protocol import Engine
from flowprefill.errors import KVTransferFailed, reason_of
from flowprefill.metrics.engine import KVTransferMetrics
from flowprefill.server.holds import HoldTable
from flowprefill.server.kv_frames import (
    PIECE_BYTES,
    Abort,
    Ack,
    Blocks,
    Message,
    Pull,
    Refused,
    Released,
    layout_of,
    next_message,
    send_message,
    send_payload,
)
from flowprefill.server.kv_transfer import STREAM_LIMIT_BYTES, TransferLimits, in_thread, pieces

log = logging.getLogger(__name__)


class KVServer:
    """The producer's side: serves pulls of held blocks."""

    def __init__(
        self,
        engine: Engine,
        holds: HoldTable,
        metrics: KVTransferMetrics,
        *,
        limits: TransferLimits,
    ) -> None:
        self._engine = engine
        self._layout = layout_of(engine.spec)
        self._holds = holds
        self._metrics = metrics
        self._limits = limits
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, at: socket.socket) -> None:
        """Listen on a bound socket."""
        self._server = await asyncio.start_server(self._serve, sock=at, limit=STREAM_LIMIT_BYTES)

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
            log.info("KV connection lost", extra={"reason": reason_of(error)})
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
                message = await next_message(reader)
            match message:
                case None:
                    return
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
            for piece in pieces(pull.block_ids, per_piece):
                try:
                    data = await in_thread(partial(self._engine.read_blocks, piece))
                except Exception as error:
                    log.exception("KV blocks could not be read", extra={"request_id": pull.request_id})
                    self._metrics.failed("engine_failed")
                    await send_message(writer, Refused(reason="engine_failed", message=reason_of(error)))
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


async def _try_to_tell(writer: asyncio.StreamWriter, message: Message) -> None:
    try:
        async with asyncio.timeout(1.0):
            await send_message(writer, message)
    except (OSError, TimeoutError) as error:
        log.debug("KV error not delivered", extra={"reason": reason_of(error)})
