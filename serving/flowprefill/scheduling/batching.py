"""Filling a batch: a head and whoever may ride along.

Rules of this file
1. The head runs in any case. Candidates come in policy order and join while tokens fit the budget, counted net of
   cached prefix.
2. A candidate joins only if no deadline becomes infeasible with the batch predicted as packed: none of a member's,
   the head's and its own included, and none of a better ranked job's that it overtakes (a parked task, a
   prompt too long to join, a decode step). Deadlines that are lost already have no say.
3. Blocks are taken member by member, each rounded up on its own; one that finds none goes on waiting.
4. With `chunk_tokens` a forward takes at most that many tokens and the last to join may take part of its prompt. Blocks
   for a whole prompt are taken with its first chunk, so that what has started can always end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from flowprefill.scheduling.actions import Task, TaskItem
from flowprefill.scheduling.kv import KVAccounting
from flowprefill.scheduling.ordering import Rank
from flowprefill.scheduling.predictor import Predictor
from flowprefill.scheduling.pricing import cached_tokens
from flowprefill.scheduling.settings import SchedulerSettings
from flowprefill.scheduling.state import ActiveTask, Job, Member, WaitingRequest, slack_s


@dataclass(slots=True, kw_only=True)
class Batch:
    """Members with their blocks taken, and the batch's profiled seconds as packed."""

    members: list[Member] = field(default_factory=list)
    base_s: float = 0.0


class BatchFiller:
    """Builds one batch at one moment."""

    def __init__(
        self, settings: SchedulerSettings, kv: KVAccounting, predictor: Predictor, now_s: float
    ) -> None:
        self._kv = kv
        self._predictor = predictor
        self._now_s = now_s
        self._guarded = settings.guard_deadlines
        self._chunk = settings.chunk_tokens
        self._room = settings.batch_token_budget if self._chunk is None else self._chunk
        self._latest_end_s = math.inf  # the batch must end before this for every deadline that counts
        self._batch = Batch()

    def fill(
        self,
        head: WaitingRequest,
        candidates: Iterable[tuple[Rank, WaitingRequest]],
        parked: Sequence[tuple[Rank, Job]],
    ) -> Batch:
        """A batch around `head`, whose blocks must be there to take. `parked` tasks come best first."""
        start = self._reserve(head)
        assert start is not None, f"no blocks for {head.request_id!r}, which was found allocatable"
        left = head.request.num_prompt_tokens - start
        num_tokens = left if self._chunk is None else min(left, self._chunk)
        self._batch.base_s = self._predictor.base_s(num_tokens, start)
        self._join(head, start, num_tokens)
        parked_left = list(reversed(parked))
        for rank, waiting in candidates:
            if self._room <= 0:
                break
            if waiting is head:
                continue
            while parked_left and parked_left[-1][0] < rank:
                _, job = parked_left.pop()
                self._protect(job.deadline_s, job.remaining_s)
            if self._try(waiting) == "passed over":
                self._protect(waiting.request.deadline_s, self._predictor.scale * waiting.base_s)
        return self._batch

    def _try(self, waiting: WaitingRequest) -> Literal["joined", "passed over", "no blocks"]:
        """Let the candidate join if it may. One that lacks blocks could not run anyway: nobody delays it."""
        request = waiting.request
        if request.kind == "decode":
            return "passed over"
        start = cached_tokens(waiting, self._kv)
        left = request.num_prompt_tokens - start
        num_tokens = left if self._chunk is None else min(left, self._room)
        if num_tokens > self._room:
            return "passed over"
        base_s = self._batch.base_s + self._predictor.share_s(num_tokens, start)
        end_s = self._now_s + self._predictor.scale * base_s
        if self._guarded and end_s >= min(self._latest_end_s, self._bound_s(waiting, start, num_tokens)):
            return "passed over"
        if self._reserve(waiting) is None:
            return "no blocks"
        self._batch.base_s = base_s
        self._join(waiting, start, num_tokens)
        return "joined"

    def _bound_s(self, waiting: WaitingRequest, start: int, num_tokens: int) -> float:
        """When a batch with this share must have ended for the request's deadline; infinite when lost.

        After a chunk the rest of the prompt is still to come.
        """
        request, predictor = waiting.request, self._predictor
        alone_s = predictor.predict_s(request.num_prompt_tokens - start, start)
        if slack_s(request.deadline_s, self._now_s, alone_s) <= 0.0:
            return math.inf
        end = start + num_tokens
        return request.deadline_s - predictor.predict_s(request.num_prompt_tokens - end, end)

    def _protect(self, deadline_s: float, remaining_s: float) -> None:
        """An overtaken job must be able to start when the batch ends, unless it is too late already."""
        bound_s = deadline_s - remaining_s
        if self._now_s + self._predictor.scale * self._batch.base_s < bound_s:
            self._latest_end_s = min(self._latest_end_s, bound_s)

    def _reserve(self, waiting: WaitingRequest) -> int | None:
        """Take the request's blocks; tokens in place, or None when there are not enough blocks."""
        if waiting.started:
            return waiting.num_computed
        request = waiting.request
        allocation = self._kv.allocate(request.request_id, request.num_prompt_tokens, request.prefix_hashes)
        return None if allocation is None else allocation.num_cached_tokens

    def _join(self, waiting: WaitingRequest, start: int, num_tokens: int) -> None:
        end = start + num_tokens
        self._room -= num_tokens
        self._latest_end_s = min(self._latest_end_s, self._bound_s(waiting, start, num_tokens))
        item = TaskItem(
            request_id=waiting.request_id,
            start=start,
            num_tokens=num_tokens,
            block_ids=self._kv.block_ids(waiting.request_id),
            completes=end == waiting.request.num_prompt_tokens,
        )
        self._batch.members.append(Member(waiting=waiting, item=item))


def build_task(
    task_id: int,
    head: WaitingRequest,
    candidates: Iterable[tuple[Rank, WaitingRequest]],
    parked: Sequence[tuple[Rank, Job]],
    *,
    settings: SchedulerSettings,
    kv: KVAccounting,
    predictor: Predictor,
    now_s: float,
) -> ActiveTask:
    """The task around `head`, with its blocks taken. A decode step runs alone and needs none here."""
    request = head.request
    if request.kind == "decode":
        item = TaskItem(
            request_id=request.request_id,
            start=0,
            num_tokens=request.num_prompt_tokens,
            block_ids=(),
            completes=True,
        )
        batch = Batch(members=[Member(waiting=head, item=item)], base_s=head.base_s)
    else:
        batch = BatchFiller(settings, kv, predictor, now_s).fill(head, candidates, parked)
    task = Task(
        task_id=task_id,
        items=tuple(member.item for member in batch.members),
        predicted_s=predictor.scale * batch.base_s,
        granularity="operator" if settings.preemption == "operator" else "layer",
        kind=request.kind,
    )
    return ActiveTask(task=task, members=tuple(batch.members), base_s=batch.base_s)
