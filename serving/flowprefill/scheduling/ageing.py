"""Ageing: a request far past its SLO gets a small share of service instead of none.

Rules of this file
1. A request ages at `factor` times its SLO after its arrival.
2. While aged work exists, it is owed `share` of every second of service; what it receives is taken off.
3. Once a quantum is owed, the oldest aged request goes before everything, until nothing is owed.
   The quantum keeps it from being preempted and resumed for every millisecond owed.
"""

from __future__ import annotations

from collections.abc import Iterator

from sortedcontainers import SortedList

from flowprefill.scheduling.settings import Ageing
from flowprefill.scheduling.state import ActiveTask, WaitingRequest


def ages_at_s(waiting: WaitingRequest, ageing: Ageing) -> float:
    """The moment from which the request counts as aged."""
    return waiting.request.arrival_s + ageing.factor * waiting.request.ttft_slo_s


def has_aged(waiting: WaitingRequest, ageing: Ageing | None, now_s: float) -> bool:
    return ageing is not None and ages_at_s(waiting, ageing) <= now_s


def aged_fraction(task: ActiveTask, ageing: Ageing | None, now_s: float) -> float:
    """The part of the task's tokens that belong to aged requests somebody waits for, in [0, 1]."""
    if ageing is None:
        return 0.0
    aged = sum(m.item.num_tokens for m in task.members if m.live and has_aged(m.waiting, ageing, now_s))
    return aged / sum(item.num_tokens for item in task.task.items)


class AgedRequests:
    """Waiting requests by the moment they age, and the aged ones oldest first."""

    def __init__(self, ageing: Ageing) -> None:
        self._ageing = ageing
        self._young: SortedList[tuple[float, int]] = SortedList()  # (ages at, sequence)
        self._aged: SortedList[tuple[float, int]] = SortedList()  # (arrival, sequence)
        self._requests: dict[int, WaitingRequest] = {}

    def add(self, waiting: WaitingRequest) -> None:
        self._requests[waiting.sequence] = waiting
        self._young.add((ages_at_s(waiting, self._ageing), waiting.sequence))

    def remove(self, waiting: WaitingRequest) -> None:
        del self._requests[waiting.sequence]
        key = (ages_at_s(waiting, self._ageing), waiting.sequence)
        if key in self._young:
            self._young.remove(key)
        else:
            self._aged.remove((waiting.request.arrival_s, waiting.sequence))

    def advance(self, now_s: float) -> None:
        """Move what has aged by now."""
        while self._young and self._young[0][0] <= now_s:
            _, sequence = self._young.pop(0)
            self._aged.add((self._requests[sequence].request.arrival_s, sequence))

    def oldest_first(self) -> Iterator[WaitingRequest]:
        return (self._requests[sequence] for _, sequence in self._aged)

    @property
    def any_aged(self) -> bool:
        return bool(self._aged)

    @property
    def next_s(self) -> float | None:
        """When the next waiting request ages."""
        return float(self._young[0][0]) if self._young else None


class ServiceAccount:
    """How much service aged work is owed, in seconds with the baton. Without ageing, nothing ever."""

    def __init__(self, ageing: Ageing | None) -> None:
        self._ageing = ageing
        self._owed_s = 0.0
        self.boosting = False

    def served(self, seconds: float, aged_fraction: float) -> None:
        """Count service given while aged work existed; `aged_fraction` of it went to aged requests."""
        if self._ageing is None:
            return
        self._owed_s += seconds * (self._ageing.share - aged_fraction)
        if self._owed_s <= 0.0:
            self.boosting = False
        elif self._owed_s >= self._ageing.quantum_s:
            self.boosting = True

    def reset(self) -> None:
        """No aged work is left: nothing is owed."""
        self._owed_s = 0.0
        self.boosting = False

    def turns_in_s(self, aged_fraction: float) -> float | None:
        """Seconds of service until boosting starts or ends, if it goes on like this; None when it will not."""
        if self._ageing is None:
            return None
        rate = self._ageing.share - aged_fraction
        if self.boosting:
            return self._owed_s / -rate if rate < 0.0 else None
        return (self._ageing.quantum_s - self._owed_s) / rate if rate > 0.0 else None
