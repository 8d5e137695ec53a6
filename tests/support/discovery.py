"""What a discovery reports, collected in the background, and the contract that every discovery keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from flowprefill.proxy.discovery import Discovery
from flowprefill.wire import Endpoint

LIMIT_S = 60.0


class Source(Protocol):
    """Where endpoints come from: a file, an API server."""

    @property
    def discovery(self) -> Discovery: ...

    async def publish(self, endpoints: Sequence[Endpoint]) -> None:
        """Make these the truth."""
        ...

    async def break_off(self) -> None:
        """Take the source away."""
        ...

    async def mend(self) -> None:
        """Bring it back with what it held."""
        ...


@dataclass
class Watcher:
    """All reports so far. `failure` is how the watch ended, which it never should."""

    reports: list[tuple[Endpoint, ...]] = field(default_factory=list)
    failure: BaseException | None = None

    @property
    def names(self) -> set[str]:
        return {endpoint.name for endpoint in self.reports[-1]}

    def endpoint(self, name: str) -> Endpoint:
        return next(endpoint for endpoint in self.reports[-1] if endpoint.name == name)

    async def until(self, holds: Callable[[], object], what: str = "") -> None:
        await until_async(lambda: _now(holds), f"{what}; last report {self.reports[-1:]}", self)

    async def until_names(self, names: Iterable[str]) -> None:
        wanted = set(names)
        await self.until(lambda: self.reports and self.names == wanted, f"names are {wanted}")


@asynccontextmanager
async def watching(discovery: Discovery) -> AsyncIterator[Watcher]:
    """Follow `discovery` until the end of the block."""
    watcher = Watcher()

    async def follow() -> None:
        try:
            async for endpoints in discovery.watch():
                watcher.reports.append(endpoints)
        except Exception as error:
            watcher.failure = error
            raise

    task = asyncio.create_task(follow())
    try:
        yield watcher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert watcher.failure is None, f"a watch never raises: {watcher.failure!r}"


async def until_async(holds: Callable[[], Awaitable[object]], what: str, watcher: Watcher) -> None:
    try:
        async with asyncio.timeout(LIMIT_S):
            while not await holds():
                assert watcher.failure is None, f"a watch never raises: {watcher.failure!r}"
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {LIMIT_S:g} s: {what}") from None


async def _now(holds: Callable[[], object]) -> object:
    return holds()
