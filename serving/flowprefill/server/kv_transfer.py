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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

STREAM_LIMIT_BYTES = 2**20
"""Bytes that one connection's reader keeps before it makes the other side wait."""


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


def pieces(block_ids: Sequence[int], size: int) -> list[Sequence[int]]:
    """The blocks in order, at most `size` at a time."""
    return [block_ids[at : at + size] for at in range(0, len(block_ids), size)]


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread. Cancelled, it still waits for the thread: blocks must not change hands before."""
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise
