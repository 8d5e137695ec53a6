"""kopf on a thread and an event loop of its own.

At its end kopf cancels every task of its loop that began after it, and a watch stream with an error in it (an API server
that loses its etcd, say) ends kopf. Apart from the passes, that is only a reason to begin watching anew, with lists.
Events reach the passes' loop in the order in which kopf hands them over.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import kopf

from flowprefill_operator.controller.handlers import settings

log = logging.getLogger(__name__)

PAUSE_S = 2.0
"""Between an end of kopf that nobody asked for and its next beginning."""

REASON_LENGTH = 300


class Watches:
    """Runs kopf until stopped. The registry's handlers are called on kopf's loop."""

    def __init__(
        self, registry: kopf.OperatorRegistry, namespaces: Sequence[str], *, ended: Callable[[], None]
    ) -> None:
        """`namespaces` to watch; empty is all. `ended` is called, on the thread, when watches end by themselves."""
        self._registry = registry
        self._namespaces = tuple(namespaces)
        self._ended = ended
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    async def run(self) -> None:
        """Watch until cancelled; the thread has ended on return."""
        thread = asyncio.create_task(asyncio.to_thread(self._serve), name="watches' thread")
        try:
            await asyncio.shield(thread)
        finally:
            self._stopping.set()
            self.begin_anew()
            await thread

    def begin_anew(self) -> None:
        """End kopf; unless this was stopped it begins again, and finds what APIs there are now. From any thread."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)

    def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                asyncio.run(self._watch())
            except Exception as error:
                # One line, or the uninstallation of another project fills the log.
                log.warning(
                    "watches have ended; they begin anew",
                    exc_info=log.isEnabledFor(logging.DEBUG),
                    extra={"reason": _words(error), "pause_s": PAUSE_S},
                )
                self._ended()
            self._stopping.wait(PAUSE_S)

    async def _watch(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(_left_behind)
        if self._stopping.is_set():
            return
        clusterwide = not self._namespaces
        await kopf.operator(
            registry=self._registry,
            settings=settings(clusterwide=clusterwide),
            clusterwide=clusterwide,
            namespaces=self._namespaces,
            standalone=True,
            stop_flag=self._stop,
        )


def _words(error: Exception) -> str:
    if isinstance(error, kopf.LoginError):
        return "the API server does not accept the operator's credentials"
    return f"{type(error).__name__}: {error}"[:REASON_LENGTH]


def _left_behind(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """kopf leaves tasks whose errors nobody asks for, once it has ended with the first of them."""
    log.debug(
        "a task of the watches has failed",
        extra={"reason": str(context.get("exception") or context["message"])},
    )
