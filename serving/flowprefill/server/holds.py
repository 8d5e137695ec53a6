"""Blocks of finished prefills that wait to be pulled, each under a lease.

A request's hold ends by pull, by abort or when its lease ends, exactly once; the blocks are given back only
after the last transfer that reads them is over. Everything runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

log = logging.getLogger(__name__)

LEASE_S = 60.0

EndReason = Literal["pulled", "aborted", "expired"]


@dataclass(slots=True, kw_only=True)
class _Hold:
    block_ids: tuple[int, ...]
    lease: asyncio.TimerHandle
    readers: int = 0
    end: EndReason | None = None


class HoldTable:
    """Holds by request id. `on_end(request_id, reason)` is called once the blocks may be reused."""

    def __init__(self, on_end: Callable[[str, EndReason], None], *, lease_s: float = LEASE_S) -> None:
        self._on_end = on_end
        self._lease_s = lease_s
        self._holds: dict[str, _Hold] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._holds)

    def add(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        """Hold these blocks from now until an end."""
        assert request_id not in self._holds, f"{request_id} is held already"
        lease = asyncio.get_running_loop().call_later(self._lease_s, self.end, request_id, "expired")
        self._holds[request_id] = _Hold(block_ids=block_ids, lease=lease)
        self._empty.clear()

    def end(self, request_id: str, reason: EndReason) -> bool:
        """End a hold; the first reason counts. False when the request holds nothing (any more)."""
        hold = self._holds.get(request_id)
        if hold is None or hold.end is not None:
            return False
        hold.end = reason
        hold.lease.cancel()
        self._drop_if_over(request_id, hold)
        return True

    @contextmanager
    def reading(self, request_id: str) -> Iterator[tuple[int, ...] | None]:
        """The held blocks, which stay in place inside the block; None when the request holds nothing."""
        hold = self._holds.get(request_id)
        if hold is None or hold.end is not None:
            yield None
            return
        hold.readers += 1
        try:
            yield hold.block_ids
        finally:
            hold.readers -= 1
            self._drop_if_over(request_id, hold)

    async def wait_empty(self) -> None:
        """Return once nothing is held."""
        await self._empty.wait()

    def _drop_if_over(self, request_id: str, hold: _Hold) -> None:
        if hold.end is None or hold.readers:
            return
        del self._holds[request_id]
        if not self._holds:
            self._empty.set()
        if hold.end == "expired":
            log.warning("KV was not pulled within its lease", extra={"request_id": request_id})
        self._on_end(request_id, hold.end)
