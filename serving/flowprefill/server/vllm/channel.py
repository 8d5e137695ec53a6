"""What the engine core's process and its parent tell each other, over a Unix socket in a directory of the parent's own.

    core ─▶ parent   Started, once; Decided, a scheduling round each; Seen, the state after it
    parent ─▶ core   Reconfigure, when the live document changed

Messages are pickles between two processes of one pod that share a random key. Times are seconds on CLOCK_MONOTONIC, which
all processes of a machine share. The core never waits for the parent: what the parent does not take in time is lost,
and the parent is told how much. Imports nothing beyond the standard library and the scheduler's plain values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from typing import TYPE_CHECKING

from flowprefill.scheduling.events import Arrival

if TYPE_CHECKING:
    from flowprefill.engines.protocol import EngineSpec
    from flowprefill.scheduling.actions import Action
    from flowprefill.scheduling.events import Event
    from flowprefill.scheduling.profile import Profile
    from flowprefill.scheduling.settings import SchedulerSettings
    from flowprefill.scheduling.snapshot import SchedulerSnapshot
    from flowprefill_crd import LiveConfig

log = logging.getLogger(__name__)

KEY_VARIABLE = "FLOWPREFILL_CHANNEL_KEY"
"""Environment variable: the key that both ends show, in hex."""

MAX_UNSENT = 4096
"""Messages that wait in the core for the socket."""

FLUSH_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The engine is loaded. `profile` are the prefill times that its predictor starts from."""

    spec: EngineSpec
    profile: Profile | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """One event at `now_s` and the scheduler's answer. Requests come without their prefix hashes.

    `round_s` is the time that the scheduler took, None when nobody measured it.
    """

    event: Event
    actions: tuple[Action, ...]
    now_s: float
    round_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The scheduler's state after a round, and the newest hashes in the prefix cache."""

    snapshot: SchedulerSnapshot
    cached_prefixes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconfigure:
    """The live document in use from now on, and what the scheduler takes from it.

    `tbt_slo_s` is the default class's target between two tokens.
    """

    live: LiveConfig
    settings: SchedulerSettings
    tbt_slo_s: float


FromCore = Started | Decided | Seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A message on the wire. `num_lost` counts the `Decided` that did not fit since the core's start."""

    message: FromCore
    num_lost: int = 0


class CoreChannel:
    """The engine core's end. Any thread may `send`; nothing here ever blocks or fails the core.

    Without an address it does nothing, for who runs vLLM without our parent. When the parent has gone, it ends quietly.
    """

    def __init__(
        self,
        address: str | None,
        on_message: Callable[[Reconfigure], None],
        *,
        key: bytes | None = None,
        limit: int = MAX_UNSENT,
    ) -> None:
        """`on_message` is called on the reading thread. `key` is the environment's unless given."""
        self._on_message = on_message
        self._limit = limit
        self._lock = threading.Condition()
        self._unsent: deque[Started | Decided] = deque()
        self._seen: Seen | None = None
        self._num_lost = 0
        self._num_superseded = 0
        self._ended = address is None
        self._closing = False
        self._connection: Connection | None = None
        self._writer: threading.Thread | None = None
        if address is not None:
            key = key if key is not None else bytes.fromhex(os.environ.get(KEY_VARIABLE, ""))
            self._writer = threading.Thread(
                target=self._write, args=(address, key), name="channel-writer", daemon=True
            )
            self._writer.start()

    @property
    def num_lost(self) -> int:
        """`Decided` that did not fit into the queue."""
        return self._num_lost

    @property
    def num_superseded(self) -> int:
        """`Seen` that a newer one replaced before it was sent."""
        return self._num_superseded

    @property
    def ended(self) -> bool:
        """Whether nobody listens: no parent was named, or it has gone."""
        return self._ended

    def send(self, message: FromCore) -> None:
        """Hand `message` to the writing thread. A `Seen` replaces an older one; of the rest the oldest go first."""
        with self._lock:
            if self._ended or self._closing:
                return
            if isinstance(message, Seen):
                self._num_superseded += self._seen is not None
                self._seen = message
            else:
                if len(self._unsent) >= self._limit:
                    self._make_room()
                self._unsent.append(message)
            self._lock.notify()

    def close(self) -> None:
        """Send what is left, for a second at most, and end both threads."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        if self._writer is not None:
            self._writer.join(FLUSH_S)
        self._end()
        if self._writer is not None:
            self._writer.join(FLUSH_S)

    def _make_room(self) -> None:
        """Drop the oldest decision; `Started` is never dropped."""
        kept = self._unsent.popleft()
        if isinstance(kept, Started):
            if self._unsent:
                self._unsent.popleft()
                self._num_lost += 1
            self._unsent.appendleft(kept)
        else:
            self._num_lost += 1

    def _next(self) -> Parcel | None:
        """Wait for a message; None when the channel ends."""
        with self._lock:
            while not (self._unsent or self._seen or self._closing or self._ended):
                self._lock.wait()
            if self._ended:
                return None
            message: FromCore | None
            if self._unsent:
                message = self._unsent.popleft()
            else:
                message, self._seen = self._seen, None
            return None if message is None else Parcel(message=message, num_lost=self._num_lost)

    def _write(self, address: str, key: bytes) -> None:
        try:
            connection = Client(address, "AF_UNIX", authkey=key)
        except Exception as error:  # no parent is no reason not to serve
            log.warning("no parent process answers", extra={"address": address, "error": repr(error)})
            self._end()
            return
        with self._lock:
            self._connection = connection
        reader = threading.Thread(target=self._read, args=(connection,), name="channel-reader", daemon=True)
        reader.start()
        while (parcel := self._next()) is not None:
            try:
                connection.send(dataclasses.replace(parcel, message=without_hashes(parcel.message)))
            except OSError:
                break
            except (
                Exception
            ):  # a message that cannot be pickled is a fault here, not a reason to stop the engine
                log.exception("a message to the parent process was not sent")
                with self._lock:
                    self._num_lost += 1
        self._end()
        reader.join()
        connection.close()

    def _read(self, connection: Connection) -> None:
        try:
            while True:
                message = connection.recv()
                try:
                    self._on_message(message)
                except Exception:  # the parent's word is not taken, and the engine goes on by the last one
                    log.exception("a message of the parent process was not taken over")
        except (EOFError, OSError):
            if not self._closing:
                log.info("the parent process listens no more")
        except Exception:
            log.exception("the parent process sent what cannot be read")
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._ended = True
            self._unsent.clear()
            self._seen = None
            connection, self._connection = self._connection, None
            self._lock.notify_all()
        if connection is not None:
            hang_up(connection)


def without_hashes(message: FromCore) -> FromCore:
    """`message` with its requests' prefix hashes left out: thousands of numbers that the parent has no use for."""
    if not isinstance(message, Decided) or not isinstance(message.event, Arrival):
        return message
    requests = tuple(dataclasses.replace(request, prefix_hashes=()) for request in message.event.requests)
    return dataclasses.replace(message, event=dataclasses.replace(message.event, requests=requests))


def hang_up(connection: Connection) -> None:
    """End a connection for both sides; a thread that reads from it wakes, which closing alone does not do."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)
