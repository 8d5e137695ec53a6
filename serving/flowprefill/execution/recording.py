"""Recordings of a scheduler's life: every event, the time it was handled, and the actions that answered it.

A recording is JSON lines: a header that tells how to build the same scheduler, then one line a decision. Since the
scheduler is pure, replaying the events gives the same actions; where it does not, something other than the events
decided (a clock, the order of a set, shared state), or the code has changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, get_args

from pydantic import TypeAdapter

from flowprefill.scheduling.actions import Action
from flowprefill.scheduling.events import Event
from flowprefill.scheduling.kv import KVCachePool
from flowprefill.scheduling.predictor import Coefficients, Predictor
from flowprefill.scheduling.scheduler import Scheduler
from flowprefill.scheduling.settings import SchedulerSettings

# Any: the adapters of a union's members have no common type parameter.
_ADAPTERS: dict[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(kind) for kind in (*get_args(Event), *get_args(Action))
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """How the recorded scheduler was built: its settings, KV pool and the predictor's profiled coefficients."""

    settings: SchedulerSettings
    coefficients: Coefficients
    num_blocks: int
    block_size: int
    prefix_caching: bool = True

    @classmethod
    def of(cls, scheduler: Scheduler) -> Header:
        """The header of a scheduler that has not handled anything yet, and whose KV pool is our own."""
        assert isinstance(scheduler.kv, KVCachePool), (
            "decisions over an engine's own allocation cannot be replayed"
        )
        return cls(
            settings=scheduler.settings,
            coefficients=scheduler.predictor.coefficients,
            num_blocks=scheduler.kv.num_blocks,
            block_size=scheduler.kv.block_size,
            prefix_caching=scheduler.kv.prefix_caching,
        )

    def build(self) -> Scheduler:
        """A scheduler as it was when the recording began."""
        kv = KVCachePool(self.num_blocks, self.block_size, prefix_caching=self.prefix_caching)
        return Scheduler(self.settings, kv, Predictor(self.coefficients))


_HEADER: TypeAdapter[Header] = TypeAdapter(Header)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One event and what the scheduler answered."""

    now_s: float
    event: Event
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first decision of a replay that is not the recorded one; `index` counts decisions from 0."""

    index: int
    recorded: Decision
    replayed: tuple[Action, ...]


class Recorder:
    """Writes a recording; call it with each decision (it is a driver's `record`). One thread."""

    def __init__(self, out: TextIO, header: Header) -> None:
        self._out = out
        self._out.write(_HEADER.dump_json(header).decode() + "\n")

    def __call__(self, event: Event, actions: Sequence[Action], now_s: float) -> None:
        line = {"now_s": now_s, "event": _encode(event), "actions": [_encode(action) for action in actions]}
        self._out.write(json.dumps(line, separators=(",", ":")) + "\n")


def read(lines: Iterable[str]) -> tuple[Header, Iterator[Decision]]:
    """The header and the decisions of a recording. Raises ValueError when it is empty or a line is damaged."""
    rest = iter(lines)
    first = next(rest, None)
    if first is None:
        raise ValueError("the recording is empty; accepted are JSON lines that begin with a header")
    return _HEADER.validate_json(first), map(_decision, rest)


def replay(lines: Iterable[str], scheduler: Scheduler | None = None) -> Difference | None:
    """Handle the recorded events again; the first difference, or None when every action is the same.

    `scheduler` is built from the header unless given.
    """
    header, decisions = read(lines)
    scheduler = scheduler or header.build()
    for index, recorded in enumerate(decisions):
        replayed = scheduler.handle(recorded.event, recorded.now_s)
        if replayed != recorded.actions:
            return Difference(index=index, recorded=recorded, replayed=replayed)
    return None


def _encode(value: Event | Action) -> dict[str, Any]:
    name = type(value).__name__
    return {"type": name, **_ADAPTERS[name].dump_python(value, mode="json")}


def _decision(line: str) -> Decision:
    fields = json.loads(line)
    actions = tuple(_decode(action) for action in fields["actions"])
    return Decision(now_s=fields["now_s"], event=_decode(fields["event"]), actions=actions)


def _decode(fields: dict[str, Any]) -> Any:
    name = fields.pop("type")
    if name not in _ADAPTERS:
        raise ValueError(f"a recording names {name!r}; accepted are {', '.join(sorted(_ADAPTERS))}")
    return _ADAPTERS[name].validate_python(fields)
