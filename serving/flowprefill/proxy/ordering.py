"""The proxy's waiting requests, in the order of the scheduler's own policies."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from flowprefill.request import Request
from flowprefill.scheduling.ageing import AgedRequests
from flowprefill.scheduling.policy import POLICIES
from flowprefill.scheduling.settings import Ageing, PolicyName
from flowprefill.scheduling.state import WaitingRequest


class WaitingQueue:
    """Waiting requests in policy order, and those that have aged by age."""

    def __init__(self, policy: PolicyName, ageing: Ageing | None) -> None:
        self._order = POLICIES[policy].make_order()
        self._aged = AgedRequests(ageing) if ageing is not None else None
        self._waiting: dict[str, WaitingRequest] = {}
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[tuple[Request, float]]:
        """Requests with their predicted work, by arrival."""
        return ((waiting.request, waiting.base_s) for waiting in self._waiting.values())

    def add(self, request: Request, work_s: float) -> None:
        """Let a request wait; `work_s` is its predicted prefill time in seconds."""
        assert request.request_id not in self._waiting, f"{request.request_id} waits already"
        waiting = WaitingRequest(request=request, sequence=self._sequence, base_s=work_s)
        self._sequence += 1
        self._waiting[request.request_id] = waiting
        self._order.add(waiting)
        if self._aged is not None:
            self._aged.add(waiting)

    def discard(self, request_id: str) -> None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return
        self._order.remove(waiting)
        if self._aged is not None:
            self._aged.remove(waiting)

    def first(self, limit: int, now_s: float) -> list[Request]:
        """At most `limit` requests, the next to go first."""
        view = self._order.view(now_s, 1.0, ())
        return [waiting.request for _, waiting in islice(view, limit)]

    def oldest_aged(self, now_s: float) -> Request | None:
        """The request that has waited longest past its ageing bound."""
        if self._aged is None:
            return None
        self._aged.advance(now_s)
        return next((waiting.request for waiting in self._aged.oldest_first()), None)

    @property
    def next_ageing_s(self) -> float | None:
        """When the next request ages."""
        return self._aged.next_s if self._aged is not None else None
