"""Long work that the end of the process does not wait for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_daemon(work: Callable[[], T], *, name: str) -> T:
    """Run `work` in a daemon thread. Cancelling stops the wait; the thread goes on and its result is dropped."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # a T where there is no error

    def main() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # the waiter's to deal with
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=main, name=name, daemon=True).start()
    return await done
