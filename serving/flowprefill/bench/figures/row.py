"""A row of the table of figures."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from flowprefill.bench.demo import Progress
from flowprefill.bench.target import Target
from flowprefill_crd import FlowPrefillService

Op = Literal["<=", "<", ">=", ">"]

_COMPARE: dict[Op, Callable[[float, float], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured figure: it holds when `value op bar`. `detail` says what the value was made of."""

    name: str
    value: float
    op: Op
    bar: float
    command: str
    detail: str = ""

    @property
    def holds(self) -> bool:
        return _COMPARE[self.op](self.value, self.bar)

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "value": self.value,
            "op": self.op,
            "bar": self.bar,
            "holds": self.holds,
            "command": self.command,
            "detail": self.detail,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What a measurement may use: a service on this machine, and a place to tell how far it is."""

    new_target: Callable[[FlowPrefillService], AbstractContextManager[Target]]
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measurement, the rows it makes, and about how many minutes it takes on two slow cores."""

    name: str
    summary: str
    minutes: float
    measure: Callable[[Bench], Iterator[Row]]
