"""The waiting requests, and the bounded look at them that a decision takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from flowprefill.scheduling.ageing import AgedRequests
from flowprefill.scheduling.ordering import Rank, SlackOrder, View
from flowprefill.scheduling.policy import POLICIES, s_edf
from flowprefill.scheduling.settings import SchedulerSettings
from flowprefill.scheduling.state import Job, WaitingRequest

MAX_CANDIDATES = 64
"""Waiting requests that one decision looks at, at most."""

STARTED_TIER = -3  # without preemption, what has begun goes on first
AGED_TIER = -2
LATE_DECODE_TIER = -1
"""A decode step past its deadline is the next token of an answer under way: giving it up, as a policy gives up a lost
prompt, would stall every answer for as long as prompts keep coming."""


class WaitingQueue:
    """Admitted requests that are in no task, in the policy's order.

    Beside the order it keeps: requests whose earlier chunks ran, the age of each request, and those to be shed
    once their deadline is lost.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self._requests: dict[str, WaitingRequest] = {}
        self._awaiting: dict[int, dict[str, WaitingRequest]] = {}  # by the block missing from the cache
        self._base_s = 0.0
        self._num_tokens = 0
        self.configure(settings)

    def configure(self, settings: SchedulerSettings) -> None:
        """Build the structures anew for these settings, once."""
        self._settings = settings
        self._policy = POLICIES[settings.policy]
        self._order = self._policy.make_order()
        self._aged = AgedRequests(settings.ageing) if settings.ageing is not None else None
        self._to_shed = SlackOrder(s_edf)
        self._started: dict[str, WaitingRequest] = {}
        self._decodes: dict[str, WaitingRequest] = {}
        for waiting in self._requests.values():
            self._enter(waiting)

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def get(self, request_id: str) -> WaitingRequest | None:
        return self._requests.get(request_id)

    @property
    def base_s(self) -> float:
        """Profiled seconds of all waiting requests, each alone."""
        return self._base_s

    @property
    def num_tokens(self) -> int:
        """Tokens all waiting requests have to compute."""
        return self._num_tokens

    @property
    def aged(self) -> AgedRequests | None:
        return self._aged

    @property
    def started(self) -> Sequence[WaitingRequest]:
        """Requests with KV of earlier chunks, in the order they came back."""
        return tuple(self._started.values())

    def add(self, waiting: WaitingRequest) -> None:
        assert waiting.request_id not in self._requests, f"{waiting.request_id!r} waits already"
        self._requests[waiting.request_id] = waiting
        self._base_s += waiting.base_s
        self._num_tokens += waiting.num_new
        self._await(waiting)
        self._enter(waiting)

    def remove(self, waiting: WaitingRequest) -> None:
        del self._requests[waiting.request_id]
        self._base_s = self._base_s - waiting.base_s if self._requests else 0.0
        self._num_tokens -= waiting.num_new
        self._await_no_more(waiting)
        self._order.remove(waiting)
        if self._aged is not None:
            self._aged.remove(waiting)
        if _may_be_shed(waiting):
            self._to_shed.remove(waiting)
        self._started.pop(waiting.request_id, None)
        self._decodes.pop(waiting.request_id, None)

    def awaiting(self, prefix_hash: int) -> Sequence[WaitingRequest]:
        """Requests for which this block is the first one missing from the cache."""
        return tuple(self._awaiting.get(prefix_hash, {}).values())

    def reprice(
        self, waiting: WaitingRequest, *, base_s: float, num_cached: int, awaited_hash: int | None
    ) -> None:
        """The request's cached prefix changed, and with it the time it needs."""
        self._await_no_more(waiting)
        waiting.awaited_hash = awaited_hash
        self._await(waiting)
        self._order.remove(waiting)
        if _may_be_shed(waiting):
            self._to_shed.remove(waiting)
        self._base_s += base_s - waiting.base_s
        self._num_tokens += waiting.num_cached - num_cached
        waiting.base_s, waiting.num_cached = base_s, num_cached
        self._order.add(waiting)
        if _may_be_shed(waiting):
            self._to_shed.add(waiting)

    def lost(self, now_s: float, scale: float) -> list[WaitingRequest]:
        """Requests that ask to be shed and whose deadline cannot be met any more."""
        return self._to_shed.lost(now_s, scale) if len(self._to_shed) else []

    def next_loss_s(self, scale: float) -> float | None:
        """When the next request is to be shed if nothing changes."""
        return self._to_shed.next_expiry_s(scale)

    def look(self, now_s: float, scale: float, tasks: Sequence[Job], *, boosting: bool) -> Look:
        """The queue at this moment. `tasks` compete with it; `boosting` puts aged requests first."""
        view = self._order.view(now_s, scale, tasks)
        return Look(self, view, scale, boosting=boosting)

    def late_decode_rank(self, job: Job, rank: Rank) -> Rank | None:
        """The place of a decode step that the policy has given up; None for everything else."""
        if job.kind != "decode" or not self._policy.lost(rank):
            return None
        return (LATE_DECODE_TIER, job.deadline_s, job.sequence, job.job_id)

    def _enter(self, waiting: WaitingRequest) -> None:
        self._order.add(waiting)
        if self._aged is not None:
            self._aged.add(waiting)
        if _may_be_shed(waiting):
            self._to_shed.add(waiting)
        if waiting.started:
            self._started[waiting.request_id] = waiting
        if waiting.request.kind == "decode":
            self._decodes[waiting.request_id] = waiting

    def _late_decodes(self, view: View, scale: float) -> list[tuple[Rank, WaitingRequest]]:
        jobs = ((waiting, waiting.job(scale)) for waiting in self._decodes.values())
        ranked = ((self.late_decode_rank(job, view.rank(job)), waiting) for waiting, job in jobs)
        return sorted(
            ((rank, waiting) for rank, waiting in ranked if rank is not None), key=lambda pair: pair[0]
        )

    def _await(self, waiting: WaitingRequest) -> None:
        if waiting.awaited_hash is not None:
            self._awaiting.setdefault(waiting.awaited_hash, {})[waiting.request_id] = waiting

    def _await_no_more(self, waiting: WaitingRequest) -> None:
        if waiting.awaited_hash is not None:
            others = self._awaiting[waiting.awaited_hash]
            del others[waiting.request_id]
            if not others:
                del self._awaiting[waiting.awaited_hash]

    def _ranked(self, view: View, scale: float, *, boosting: bool) -> Iterator[tuple[Rank, WaitingRequest]]:
        seen: set[str] = set()
        if self._settings.preemption == "none":
            for waiting in self._started.values():
                seen.add(waiting.request_id)
                yield (STARTED_TIER, 0.0, waiting.sequence, waiting.request_id), waiting
        if boosting and self._aged is not None:
            for waiting in self._aged.oldest_first():
                if waiting.request_id not in seen:
                    seen.add(waiting.request_id)
                    yield aged_rank(waiting), waiting
        for rank, waiting in self._late_decodes(view, scale):
            if waiting.request_id not in seen:
                seen.add(waiting.request_id)
                yield rank, waiting
        for rank, waiting in view:
            if waiting.request_id not in seen:
                yield rank, waiting


class Look:
    """At most `MAX_CANDIDATES` waiting requests best first, found lazily and kept for a second reading.

    The queue must not change between the first and the last reading.
    """

    def __init__(self, queue: WaitingQueue, view: View, scale: float, *, boosting: bool) -> None:
        self._queue = queue
        self._view = view
        self._boosting = boosting
        self._source = islice(queue._ranked(view, scale, boosting=boosting), MAX_CANDIDATES)
        self._seen: list[tuple[Rank, WaitingRequest]] = []

    @property
    def seen(self) -> list[WaitingRequest]:
        """Requests that were read so far."""
        return [waiting for _, waiting in self._seen]

    def __iter__(self) -> Iterator[tuple[Rank, WaitingRequest]]:
        position = 0
        while True:
            if position == len(self._seen):
                found = next(self._source, None)
                if found is None:
                    return
                self._seen.append(found)
            yield self._seen[position]
            position += 1

    def rank(self, task: Job, *, aged: bool) -> Rank:
        """A task's place among the waiting; `aged` says that its head has aged."""
        if aged and self._boosting:
            return (AGED_TIER, task.arrival_s, task.sequence, task.job_id)
        rank = self._view.rank(task)
        return self._queue.late_decode_rank(task, rank) or rank


def aged_rank(waiting: WaitingRequest) -> Rank:
    return (AGED_TIER, waiting.request.arrival_s, waiting.sequence, waiting.request_id)


def _may_be_shed(waiting: WaitingRequest) -> bool:
    request = waiting.request
    return request.shed_when_infeasible and not waiting.started and request.kind == "prefill"
