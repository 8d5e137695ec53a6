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
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedList

from flowprefill.scheduling.moore_hodgson import largest_feasible_set
from flowprefill.scheduling.state import Job, WaitingRequest

Rank = tuple[int, float, int, str]
"""(tier, value, sequence, id), smaller first."""

RankOf = Callable[[Job, float], Rank]

FEASIBLE_SET_WINDOW = 128
"""Moore-Hodgson looks at this many waiting requests that can still be met, earliest deadlines first."""

_BLOCK = 64


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
            feasible = self._feasible(now_s, scale)
            yield from self.feasible_requests(feasible)
            yield from self.infeasible_requests(feasible)

        return _RankedView(self._rank_of, now_s, scale, requests)

    def _feasible(self, now_s: float, scale: float) -> NDArray[np.bool_]:
        size = len(self._keys)
        # The same operations in the same order as `slack_s`, so that both round alike.
        feasible: NDArray[np.bool_] = (self._deadline_s[:size] - now_s) - scale * self._base_s[:size] > 0.0
        return feasible

    def feasible_requests(self, feasible: NDArray[np.bool_]) -> Iterator[WaitingRequest]:
        indices = np.flatnonzero(feasible)
        for start in range(0, len(indices), _BLOCK):
            for index in indices[start : start + _BLOCK].tolist():
                yield self._requests[index]

    def infeasible_requests(self, feasible: NDArray[np.bool_]) -> Iterator[WaitingRequest]:
        """Latest deadline first; requests of one deadline by id, hence forwards within each run of equals."""
        lost = np.flatnonzero(~feasible)
        deadlines = self._deadline_s[: len(feasible)][lost]
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
        return [self._requests[index] for index in np.flatnonzero(~self._feasible(now_s, scale)).tolist()]

    def next_expiry_s(self, scale: float) -> float | None:
        """When the slack of a request reaches zero next; None when empty."""
        size = len(self._keys)
        return float(np.min(self._deadline_s[:size] - scale * self._base_s[:size])) if size else None


class FeasibleSetOrder(SlackOrder):
    """The largest feasible set in deadline order, then what lies beyond the window, then the rest as s-edf.

    Tiers: 0 in the set, 1 beyond the window, 2 can be met but not within the set, 3 lost.
    """

    def view(self, now_s: float, scale: float, tasks: Sequence[Job]) -> View:
        feasible = self._feasible(now_s, scale)
        window = [self._requests[i] for i in np.flatnonzero(feasible)[:FEASIBLE_SET_WINDOW].tolist()]
        return _FeasibleSetView(self, self._rank_of, now_s, scale, tasks, feasible, window)


class _FeasibleSetView:
    def __init__(
        self,
        order: FeasibleSetOrder,
        rank_of: RankOf,
        now_s: float,
        scale: float,
        tasks: Sequence[Job],
        feasible: NDArray[np.bool_],
        window: list[WaitingRequest],
    ) -> None:
        self._order = order
        self._rank_of = rank_of
        self._now_s = now_s
        self._feasible = feasible
        self._window = window
        self._jobs = [waiting.job(scale) for waiting in window]
        self._scale = scale
        self._kept = largest_feasible_set([*self._jobs, *tasks], now_s)

    def rank(self, task: Job) -> Rank:
        tier, value, sequence, job_id = self._rank_of(task, self._now_s)
        return (0 if task.job_id in self._kept else 2 + tier, value, sequence, job_id)

    def __iter__(self) -> Iterator[tuple[Rank, WaitingRequest]]:
        dropped: list[tuple[Rank, WaitingRequest]] = []
        for job, waiting in zip(self._jobs, self._window, strict=True):
            rank = self.rank(job)
            if rank[0] == 0:
                yield rank, waiting
            else:
                dropped.append((rank, waiting))
        beyond = self._order.feasible_requests(self._feasible)
        for position, waiting in enumerate(beyond):
            if position >= len(self._window):
                _, value, sequence, job_id = self._rank_of(waiting.job(self._scale), self._now_s)
                yield (1, value, sequence, job_id), waiting
        yield from dropped
        for waiting in self._order.infeasible_requests(self._feasible):
            yield self.rank(waiting.job(self._scale)), waiting
