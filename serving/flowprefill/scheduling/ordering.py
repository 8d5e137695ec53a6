"""Structures that keep waiting requests in a policy's order without sorting them again at every event.

An order is told of requests that come and go. `view` fixes the time and the predictor's scale and yields requests
best first, lazily, so that a decision pays for the few it looks at. Nothing may be added or removed while a view
is being read.

What makes it cheap: the scale multiplies every prediction alike, so sizes keep their order; whether a deadline can
still be met changes with time and scale for any request, so that is never stored but computed for all in one
vector operation over arrays sorted by deadline (about 10 ns a request).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedList

from flowprefill.scheduling.moore_hodgson import feasible_set
from flowprefill.scheduling.state import Job, WaitingRequest

Rank = tuple[int, float, int, str]
"""(tier, value, sequence, id), smaller first."""

RankOf = Callable[[Job, float], Rank]

FEASIBLE_SET_WINDOW = 64
"""Moore-Hodgson looks at this many waiting requests that can still be met, earliest deadlines first."""

_BLOCK = 256


class View(Protocol):
    """An order at one moment. `tasks` given to `Order.view` may be ranked among the waiting requests."""

    def rank(self, task: Job) -> Rank: ...

    def __iter__(self) -> Iterator[tuple[Rank, WaitingRequest]]: ...


class Order(Protocol):
    """Waiting requests in one policy's order."""

    def add(self, waiting: WaitingRequest) -> None: ...

    def remove(self, waiting: WaitingRequest) -> None:
        """Take out what was added, before any field of it changes."""
        ...

    def view(self, now_s: float, scale: float, tasks: Sequence[Job]) -> View: ...


class _RankedView:
    """A view whose ranks depend on one job at a time."""

    def __init__(
        self, rank_of: RankOf, now_s: float, scale: float, requests: Callable[[], Iterator[WaitingRequest]]
    ) -> None:
        self._rank_of = rank_of
        self._now_s = now_s
        self._scale = scale
        self._requests = requests

    def rank(self, task: Job) -> Rank:
        return self._rank_of(task, self._now_s)

    def __iter__(self) -> Iterator[tuple[Rank, WaitingRequest]]:
        for waiting in self._requests():
            yield self._rank_of(waiting.job(self._scale), self._now_s), waiting


class StaticOrder:
    """For ranks that neither time nor scale reorder: arrival, deadline, size."""

    def __init__(self, rank_of: RankOf) -> None:
        self._rank_of = rank_of
        self._ranks: SortedList[Rank] = SortedList()
        self._requests: dict[str, WaitingRequest] = {}

    def add(self, waiting: WaitingRequest) -> None:
        self._ranks.add(self._rank_of(waiting.job(1.0), 0.0))
        self._requests[waiting.request_id] = waiting

    def remove(self, waiting: WaitingRequest) -> None:
        self._ranks.remove(self._rank_of(waiting.job(1.0), 0.0))
        del self._requests[waiting.request_id]

    def view(self, now_s: float, scale: float, tasks: Sequence[Job]) -> View:
        return _RankedView(
            self._rank_of, now_s, scale, lambda: (self._requests[rank[-1]] for rank in self._ranks)
        )


class DeadlinePassedOrder:
    """By deadline, those whose deadline has passed behind all others."""

    def __init__(self, rank_of: RankOf) -> None:
        self._rank_of = rank_of
        self._keys: SortedList[tuple[float, str]] = SortedList()
        self._requests: dict[str, WaitingRequest] = {}

    def add(self, waiting: WaitingRequest) -> None:
        self._keys.add((waiting.request.deadline_s, waiting.request_id))
        self._requests[waiting.request_id] = waiting

    def remove(self, waiting: WaitingRequest) -> None:
        self._keys.remove((waiting.request.deadline_s, waiting.request_id))
        del self._requests[waiting.request_id]

    def view(self, now_s: float, scale: float, tasks: Sequence[Job]) -> View:
        split = (math.nextafter(now_s, math.inf), "")  # the least key whose deadline is after now

        def requests() -> Iterator[WaitingRequest]:
            on_time = self._keys.irange(minimum=split)
            passed = self._keys.irange(maximum=split, inclusive=(True, False))
            return (self._requests[request_id] for _, request_id in chain(on_time, passed))

        return _RankedView(self._rank_of, now_s, scale, requests)


class SlackOrder:
    """By deadline those whose slack is above zero, then the others by falling deadline."""

    def __init__(self, rank_of: RankOf) -> None:
        self._rank_of = rank_of
        self._keys: list[tuple[float, str]] = []  # (deadline, id), sorted; the arrays run parallel
        self._requests: list[WaitingRequest] = []
        self._deadline_s = np.empty(256)
        self._base_s = np.empty(256)

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, waiting: WaitingRequest) -> None:
        key = (waiting.request.deadline_s, waiting.request_id)
        size = len(self._keys)
        index = bisect_left(self._keys, key)
        if size == len(self._deadline_s):
            self._deadline_s = np.concatenate((self._deadline_s, np.empty(size)))
            self._base_s = np.concatenate((self._base_s, np.empty(size)))
        for array, value in ((self._deadline_s, key[0]), (self._base_s, waiting.base_s)):
            array[index + 1 : size + 1] = array[index:size]
            array[index] = value
        self._keys.insert(index, key)
        self._requests.insert(index, waiting)

    def remove(self, waiting: WaitingRequest) -> None:
        key = (waiting.request.deadline_s, waiting.request_id)
        size = len(self._keys)
        index = bisect_left(self._keys, key)
        assert self._keys[index : index + 1] == [key], f"{key} is not in the order"
        for array in (self._deadline_s, self._base_s):
            array[index : size - 1] = array[index + 1 : size]
        del self._keys[index], self._requests[index]

    def view(self, now_s: float, scale: float, tasks: Sequence[Job]) -> View:
        def requests() -> Iterator[WaitingRequest]:
            yield from self.feasible_requests(now_s, scale)
            yield from self.infeasible_requests(now_s, scale)

        return _RankedView(self._rank_of, now_s, scale, requests)

    def feasible_requests(self, now_s: float, scale: float) -> Iterator[WaitingRequest]:
        """Requests whose slack is above zero, by deadline."""
        size = len(self._keys)
        # Deadlines up to now are lost whatever the size: the search starts behind them.
        first = int(np.searchsorted(self._deadline_s[:size], now_s, side="right"))
        for start in range(first, size, _BLOCK):
            feasible = self._feasible(now_s, scale, start, min(start + _BLOCK, size))
            for index in np.flatnonzero(feasible).tolist():
                yield self._requests[start + index]

    def infeasible_requests(self, now_s: float, scale: float) -> Iterator[WaitingRequest]:
        """The others, latest deadline first; those of one deadline by id, hence forwards within equals."""
        lost = np.flatnonzero(~self._feasible(now_s, scale, 0, len(self._keys)))
        deadlines = self._deadline_s[lost]
        last = len(lost) - 1
        while last >= 0:
            start = last
            if last > 0 and deadlines[last - 1] == deadlines[last]:
                start = int(np.searchsorted(deadlines, deadlines[last], side="left"))
            for position in range(start, last + 1):
                yield self._requests[int(lost[position])]
            last = start - 1

    def lost(self, now_s: float, scale: float) -> list[WaitingRequest]:
        """Requests whose deadline cannot be met any more, by deadline."""
        lost = np.flatnonzero(~self._feasible(now_s, scale, 0, len(self._keys)))
        return [self._requests[index] for index in lost.tolist()]

    def next_expiry_s(self, scale: float) -> float | None:
        """When the slack of a request reaches zero next; None when empty."""
        size = len(self._keys)
        return float(np.min(self._deadline_s[:size] - scale * self._base_s[:size])) if size else None

    def _feasible(self, now_s: float, scale: float, start: int, stop: int) -> NDArray[np.bool_]:
        # The same operations in the same order as `slack_s`, so that both round alike.
        slack_s = (self._deadline_s[start:stop] - now_s) - scale * self._base_s[start:stop]
        feasible: NDArray[np.bool_] = slack_s > 0.0
        return feasible


class FeasibleSetOrder(SlackOrder):
    """The largest feasible set in deadline order, then what lies beyond the window, then the rest as s-edf.

    Tiers: 0 in the set, 1 beyond the window, 2 can be met but not within the set, 3 lost.
    """

    def view(self, now_s: float, scale: float, tasks: Sequence[Job]) -> View:
        return _FeasibleSetView(self, self._rank_of, now_s, scale, tasks)


class _FeasibleSetView:
    def __init__(
        self, order: FeasibleSetOrder, rank_of: RankOf, now_s: float, scale: float, tasks: Sequence[Job]
    ) -> None:
        self._order = order
        self._rank_of = rank_of
        self._now_s = now_s
        self._scale = scale
        self._feasible = order.feasible_requests(now_s, scale)
        self._window = list(islice(self._feasible, FEASIBLE_SET_WINDOW))
        candidates = [
            (r.request.deadline_s, r.request_id, scale * r.base_s, r.request.weight) for r in self._window
        ]
        candidates.extend((job.deadline_s, job.job_id, job.remaining_s, job.weight) for job in tasks)
        self._kept = feasible_set(sorted(candidates), now_s)

    def rank(self, task: Job) -> Rank:
        tier, value, sequence, job_id = self._rank_of(task, self._now_s)
        return (0 if task.job_id in self._kept else 2 + tier, value, sequence, job_id)

    def __iter__(self) -> Iterator[tuple[Rank, WaitingRequest]]:
        dropped: list[WaitingRequest] = []
        for waiting in self._window:
            if waiting.request_id in self._kept:
                yield self.rank(waiting.job(self._scale)), waiting
            else:
                dropped.append(waiting)
        for waiting in self._feasible:
            _, value, sequence, job_id = self._rank_of(waiting.job(self._scale), self._now_s)
            yield (1, value, sequence, job_id), waiting
        for waiting in chain(dropped, self._order.infeasible_requests(self._now_s, self._scale)):
            yield self.rank(waiting.job(self._scale)), waiting
