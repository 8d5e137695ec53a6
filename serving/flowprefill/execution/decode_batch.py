"""The bookkeeping of continuous batching: who waits, who is being filled, who is in the batch. No threads, no engine.

A job goes queued -> filling -> ready -> active and leaves by one end. Blocks for prompt and whole answer are reserved
when it is admitted, in order of submission, so nobody overtakes a large job and nobody runs out of KV half-way. What
the listener is to hear is collected and handed over by the owner (`take_notices`), so that no callback runs in
the middle of a change.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from flowprefill.engines.protocol import DecodeSequence
from flowprefill.errors import InvalidRequest, QueueFull
from flowprefill.execution.decode import DecodeJob, DecodeListener, DecodeState, EndReason
from flowprefill.scheduling.kv import KVCachePool

Notice: TypeAlias = Callable[[DecodeListener], None]

FILLING_PER_ACTIVE = 2
"""Jobs may hold blocks up to this many times the batch size, so that KV is brought while the batch is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailure:
    """What a step gives a sequence instead of a token."""

    detail: str


@dataclass(slots=True, kw_only=True, eq=False)
class _Entry:
    job: DecodeJob
    state: Literal["queued", "filling", "ready", "active"] = "queued"
    cancelled: bool = False
    in_flight: bool = False
    sequence: DecodeSequence | None = None
    num_generated: int = 0


class DecodeBatch:
    """Jobs of one decoder over its own KV pool. Not thread-safe.

    `block_offset` is added to the pool's block ids to get the engine's, where the pool covers only part of
    the engine's blocks.
    """

    def __init__(
        self, kv: KVCachePool, *, max_batch_size: int, queue_limit: int, block_offset: int = 0
    ) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size is {max_batch_size}; accepted are integers from 1")
        if queue_limit < 1:
            raise ValueError(f"queue_limit is {queue_limit}; accepted are integers from 1")
        self._kv = kv
        self._max_batch_size = max_batch_size
        self._queue_limit = queue_limit
        self._block_offset = block_offset
        self._entries: dict[str, _Entry] = {}
        self._queued: dict[str, _Entry] = {}  # in order of submission
        self._ready: dict[str, _Entry] = {}
        self._active: dict[str, _Entry] = {}
        self._in_flight: tuple[_Entry, ...] = ()
        self._notices: deque[Notice] = deque()
        self._num_steps = 0
        self._num_tokens = 0

    # Jobs come and go.

    def add(self, job: DecodeJob) -> None:
        """Queue a job. Raises as `Decoder.submit`."""
        needed = self._kv.num_blocks_for(job.num_reserved_tokens)
        if needed > self._kv.num_blocks:
            raise InvalidRequest(
                f"prompt and answer need {needed} KV blocks ({job.num_prompt_tokens} + {job.max_tokens} tokens); "
                f"the decode pool has {self._kv.num_blocks}",
                param="max_tokens",
            )
        if job.request_id in self._entries:
            raise ValueError(f"request id {job.request_id!r} is in use; accepted are ids of no present job")
        if len(self._queued) >= self._queue_limit:
            raise QueueFull(
                f"{len(self._queued)} answers wait to be decoded; the queue takes {self._queue_limit}"
            )
        entry = _Entry(job=job)
        self._entries[job.request_id] = self._queued[job.request_id] = entry

    def filled(self, request_id: str) -> None:
        """The job's KV is in place."""
        entry = self._entries.get(request_id)
        if entry is None or entry.state != "filling":
            return
        if entry.cancelled:
            self._end(entry, "cancelled")
            return
        self._kv.commit(request_id, entry.job.num_filled_tokens)
        entry.state = "ready"
        self._ready[request_id] = entry
        if entry.job.first_token_id is not None:
            self._advance(entry, entry.job.first_token_id)

    def fill_failed(self, request_id: str, detail: str) -> None:
        """The job's KV does not come."""
        entry = self._entries.get(request_id)
        if entry is None or entry.state != "filling":
            return
        if entry.cancelled:
            self._end(entry, "cancelled")
        else:
            self._end(entry, "error", detail)

    def cancel(self, request_id: str) -> None:
        """End the job as soon as nobody writes its blocks."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        entry.cancelled = True
        if entry.state != "filling" and not entry.in_flight:
            self._end(entry, "cancelled")

    def end_all(self, reason: EndReason, detail: str = "") -> None:
        """The decoder stops: every job ends now."""
        for entry in tuple(self._entries.values()):
            self._end(entry, "cancelled" if entry.cancelled else reason, detail)
        self._in_flight = ()

    # Steps.

    def admit(self) -> None:
        """Give blocks to queued jobs, in order, while they fit."""
        limit = FILLING_PER_ACTIVE * self._max_batch_size
        while self._queued and len(self._entries) - len(self._queued) < limit:
            request_id, entry = next(iter(self._queued.items()))
            job = entry.job
            # The block that the first step writes is never a shared one.
            shareable = job.prefix_hashes[: job.num_filled_tokens // self._kv.block_size]
            allocation = self._kv.allocate(request_id, job.num_reserved_tokens, shareable)
            if allocation is None:
                return
            del self._queued[request_id]
            entry.state = "filling"
            block_ids = tuple(block_id + self._block_offset for block_id in allocation.block_ids)
            entry.sequence = DecodeSequence(
                request_id=request_id,
                last_token_id=job.last_token_id,
                position=job.num_prompt_tokens - 1,
                block_ids=block_ids,
                sampling=job.sampling,
                num_sampled=0 if job.first_token_id is None else 1,
                banned_token_ids=tuple(sorted(job.stop_token_ids)) if job.min_tokens > 0 else (),
            )
            self._admitted(request_id, block_ids, allocation.num_cached_tokens)

    def next_members(self) -> list[DecodeJob]:
        """Jobs that a step begun now would run."""
        room = self._max_batch_size - len(self._active)
        members = [*self._active.values(), *itertools.islice(self._ready.values(), max(room, 0))]
        return [entry.job for entry in members]

    def begin_step(self) -> tuple[DecodeSequence, ...]:
        """The sequences of the next step, in a stable order; empty when there are none. One step at a time."""
        assert not self._in_flight, "the previous step has not ended"
        while self._ready and len(self._active) < self._max_batch_size:
            request_id = next(iter(self._ready))
            entry = self._ready.pop(request_id)
            entry.state = "active"
            self._active[request_id] = entry
        self._in_flight = tuple(self._active.values())
        for entry in self._in_flight:
            entry.in_flight = True
        return tuple(_sequence(entry) for entry in self._in_flight)

    def end_step(self, results: Sequence[int | StepFailure]) -> None:
        """The step's results, one per sequence in its order."""
        entries, self._in_flight = self._in_flight, ()
        self._num_steps += 1
        for entry, result in zip(entries, results, strict=True):
            entry.in_flight = False
            if entry.cancelled:
                self._end(entry, "cancelled")
            elif isinstance(result, StepFailure):
                self._end(entry, "error", result.detail)
            else:
                self._advance(entry, result)

    def take_notices(self) -> list[Notice]:
        """What the listener is to hear since the last call, in order."""
        notices = list(self._notices)
        self._notices.clear()
        return notices

    def state(self) -> DecodeState:
        """How full the batch is."""
        num_active = len(self._active)
        return DecodeState(
            queued=len(self._queued),
            filling=len(self._entries) - len(self._queued) - num_active,
            active=num_active,
            kv_blocks=self._kv.num_blocks,
            kv_blocks_free=self._kv.num_free,
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
        )

    def _advance(self, entry: _Entry, token_id: int) -> None:
        job, sequence = entry.job, _sequence(entry)
        entry.num_generated += 1
        self._num_tokens += 1
        self._token(job.request_id, token_id)
        if token_id in job.stop_token_ids:
            self._end(entry, "stop")
        elif entry.num_generated >= job.max_tokens:
            self._end(entry, "length")
        else:
            sequence.last_token_id = token_id
            sequence.position += 1
            if entry.num_generated >= job.min_tokens:
                sequence.banned_token_ids = ()

    def _end(self, entry: _Entry, reason: EndReason, detail: str = "") -> None:
        request_id = entry.job.request_id
        for index in (self._entries, self._queued, self._ready, self._active):
            index.pop(request_id, None)
        self._kv.release(request_id)
        self._notices.append(lambda listener: listener.on_end(request_id, reason, detail))

    def _token(self, request_id: str, token_id: int) -> None:
        self._notices.append(lambda listener: listener.on_token(request_id, token_id))

    def _admitted(self, request_id: str, block_ids: tuple[int, ...], num_cached_tokens: int) -> None:
        num_prompt_tokens = self._entries[request_id].job.num_prompt_tokens
        of_prompt = block_ids[: self._kv.num_blocks_for(num_prompt_tokens)]
        self._notices.append(lambda listener: listener.on_admitted(request_id, of_prompt, num_cached_tokens))


def _sequence(entry: _Entry) -> DecodeSequence:
    assert entry.sequence is not None, "an admitted job has a sequence"
    return entry.sequence
