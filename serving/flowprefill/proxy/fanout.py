"""The events of one or several exchanges as one stream, with the client's numbering."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from flowprefill.proxy import content
from flowprefill.proxy.exchange import Exchange
from flowprefill.proxy.merge import Merger

MAX_BATCHES_AHEAD = 64
Batch = tuple[int, list[str]]


async def interleaved(exchanges: Sequence[Exchange]) -> AsyncGenerator[Batch, None]:
    """(index of the exchange, data of its events) as they come. The first error ends them all."""
    if len(exchanges) == 1:
        async with aclosing(exchanges[0].events()) as events:
            async for batch in events:
                yield 0, batch
        return
    queue: asyncio.Queue[tuple[int, list[str] | Exception | None]] = asyncio.Queue(MAX_BATCHES_AHEAD)
    tasks = [asyncio.create_task(_pump(i, exchange, queue)) for i, exchange in enumerate(exchanges)]
    try:
        open_exchanges = len(tasks)
        while open_exchanges:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_exchanges -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int, exchange: Exchange, queue: asyncio.Queue[tuple[int, list[str] | Exception | None]]
) -> None:
    try:
        async with aclosing(exchange.events()) as events:
            async for batch in events:
                await queue.put((index, batch))
    except Exception as error:  # handed to the reader, which raises it
        await queue.put((index, error))
    else:
        await queue.put((index, None))


def numbered(merger: Merger | None, index: int, batch: Sequence[str]) -> list[str]:
    """A batch as the client gets it: without the pods' own fields, renumbered when there are several prompts."""
    if merger is None:
        return [content.for_client(data) for data in batch]
    out = []
    for data in batch:
        chunk = content.parse(data)
        if chunk is None or chunk.get("error"):
            out.append(data)
            continue
        merged = merger.chunk(index, chunk)
        if merged is not None:
            out.append(json.dumps(merged, ensure_ascii=False, separators=(",", ":")))
    return out
