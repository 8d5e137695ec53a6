"""The ranks as the engine core reaches them: what is sent to whom, a thread that reads each, and what happens when one is lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from flowprefill.errors import EngineFailed
from flowprefill.execution.collective import LEADER
from flowprefill.server.vllm.ranks.link import Link, pack
from flowprefill.server.vllm.ranks.messages import Begin, Empty, FromRank, Leave, LetGo, Lost, ToRank

log = logging.getLogger("vllm.flowprefill")

CLOSE_TIMEOUT_S = 60.0
"""How long a rank may take to end its threads."""


class RanksLost(EngineFailed):
    """The ranks of the engine cannot go on together."""


class Crew:
    """All ranks of an engine. Whoever makes it closes it."""

    def __init__(
        self,
        links: Sequence[Link],
        on_message: Callable[[int, FromRank], None],
        on_lost: Callable[[RanksLost], None],
    ) -> None:
        """`links` in order of rank. `on_message(rank, message)` and `on_lost`, at most once, are called on reading threads."""
        self._links = links
        self._on_message = on_message
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._leaving = False
        self._lost: RanksLost | None = None
        self._readers = [
            threading.Thread(target=self._read, args=(rank,), name=f"rank-{rank}-link", daemon=True)
            for rank in range(len(links))
        ]

    def start(self) -> None:
        """Read from now on."""
        for reader in self._readers:
            reader.start()

    @property
    def size(self) -> int:
        return len(self._links)

    @property
    def lost(self) -> RanksLost | None:
        """Why the ranks cannot go on; None while they can."""
        return self._lost

    def to_leader(self, message: ToRank) -> None:
        self._links[LEADER].send(message)

    def to_followers(self, message: LetGo) -> None:
        packed = pack(message)
        for link in self._links[LEADER + 1 :]:
            link.send_packed(packed)

    def to_all(self, message: Begin | Empty | Leave) -> None:
        packed = pack(message)
        for link in self._links:
            link.send_packed(packed)

    def lose(self, reason: str) -> None:
        """The ranks cannot go on together. Any thread."""
        with self._lock:
            if self._lost is not None or self._leaving:
                return
            lost = self._lost = RanksLost(
                f"the ranks of the engine cannot go on together: {reason}; the pod has to start anew"
            )
        log.error("%s", lost)
        self._on_lost(lost)

    def close(self) -> None:
        """Let the ranks end and join every thread. More than once is fine; not from a reading thread."""
        with self._lock:
            first, self._leaving = not self._leaving, True
        if first and self._lost is None:
            self.to_all(Leave())
        elif first:
            self._close_links()
        for reader in self._readers:
            reader.join(CLOSE_TIMEOUT_S)
            if reader.is_alive():
                log.error("%s did not end in %.0f s", reader.name, CLOSE_TIMEOUT_S)
        self._close_links()

    def _close_links(self) -> None:
        for link in self._links:
            link.close()

    def _read(self, rank: int) -> None:
        try:
            for message in self._links[rank].received():
                if isinstance(message, Lost):
                    self.lose(f"rank {rank}: {message.reason}")
                else:
                    self._on_message(rank, message)
        except BaseException as error:  # top of the thread
            log.exception("what rank %d said could not be handled", rank)
            self.lose(f"rank {rank}: {type(error).__name__}: {error}")
        else:
            self.lose(f"rank {rank} has gone")
