"""Decoding in a pod that prefills as well: each step is a task of the scheduler with a deadline.

A step enters the scheduler as a request of kind `decode`, due one TBT target after the oldest of its sequences' last tokens. So
prefill and decode share the engine under one policy: a step that is due preempts a long prefill.

Steps are paced (`pacing.py`), so that one right after the other does not keep a long prompt from running.

Wiring (the pool here covers the engine's blocks from `block_offset` on, the scheduler's pool those before):

    decoder = ColocatedDecode(kv, listener, clock, max_batch_size=32, queue_limit=256, block_offset=n)
    driver = SchedulerDriver(scheduler, pool, clock, payload, driver_listener)
    decoder.connect(driver)
    payload(task):           `decoder.payload(task)` when task.kind is "decode"
    driver_listener.on_finish: `if decoder.on_finish(request_id, outcome, reason, result): return`

`connect` starts the pacing thread, `close` ends it. On `on_admitted` the server copies the prompt's KV (`read_blocks` of the finished prefill, `write_blocks`), releases the
prefill's blocks and calls `filled`.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from flowprefill.clock import Timekeeper
from flowprefill.engines.protocol import DecodeSequence
from flowprefill.errors import EngineFailed, Unavailable
from flowprefill.execution.decode import DecodeJob, DecodeListener, DecodeState, EndReason
from flowprefill.execution.decode_batch import DecodeBatch, StepFailure
from flowprefill.execution.decode_loop import STOPPING, checked_tokens, tell
from flowprefill.execution.pacing import StepPacer, StepTiming
from flowprefill.execution.results import Finished, FinishedDecode
from flowprefill.request import Request
from flowprefill.scheduling.actions import Outcome, Task
from flowprefill.scheduling.kv import KVCachePool

STEP_PREFIX = "decode-step/"
"""Request ids of decode steps begin like this; no other request's id may."""


class StepSink(Protocol):
    """Where steps go: a `SchedulerDriver`."""

    @property
    def num_outstanding(self) -> int: ...

    def submit(self, requests: Sequence[Request], *, bounded: bool = True) -> None: ...


class ColocatedDecode:
    """Implements `decode.Decoder` on a scheduler driver.

    Callbacks come on the scheduler's thread, or on the thread of the call that caused them; they are in order, one at a
    time, and may call back.
    """

    def __init__(
        self,
        kv: KVCachePool,
        listener: DecodeListener,
        clock: Timekeeper,
        *,
        max_batch_size: int,
        queue_limit: int,
        block_offset: int = 0,
    ) -> None:
        self._listener = listener
        self._clock = clock
        self._batch = DecodeBatch(
            kv, max_batch_size=max_batch_size, queue_limit=queue_limit, block_offset=block_offset
        )
        self._lock = threading.RLock()  # guards everything below, and orders callbacks
        self._driver: StepSink | None = None
        self._ids = itertools.count()
        self._step_id: str | None = None  # the request id of the part that runs now
        self._parts: deque[tuple[DecodeSequence, ...]] = deque()  # what is left of the present step
        self._results: list[int | StepFailure] = []
        self._lengths = StepPacer()
        self._last_token_s: dict[str, float] = {}
        self._timing: StepTiming | None = None  # of the step that begins
        self._closed = False
        self._pace_until_s: float | None = None
        self._pace_wake = clock.signal()
        self._pacer: threading.Thread | None = None

    def connect(self, driver: StepSink) -> None:
        """Say which driver runs the steps; before the first `submit`."""
        assert self._driver is None, "a decoder is connected once"
        self._driver = driver
        self._pacer = self._clock.start_thread(self._pace, name="decode-pacer")

    def submit(self, job: DecodeJob) -> None:
        with self._lock:
            if self._closed:
                raise Unavailable(STOPPING)
            self._batch.add(job)
            self._go_on()

    def filled(self, request_id: str) -> None:
        with self._lock:
            self._batch.filled(request_id)
            self._go_on()

    def fill_failed(self, request_id: str, detail: str) -> None:
        with self._lock:
            self._batch.fill_failed(request_id, detail)
            self._go_on()

    def cancel(self, request_id: str) -> None:
        with self._lock:
            self._batch.cancel(request_id)
            self._go_on()

    def state(self) -> DecodeState:
        with self._lock:
            return self._batch.state()

    def close(self) -> None:
        """End every job with `cancelled` and join the pacer. A step that still runs is the driver's to end."""
        self._stop("cancelled", "")
        if self._pacer is not None:
            self._pacer.join()

    # The pacing thread.

    def _pace(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                until_s = self._pace_until_s
            if not self._pace_wake.wait(until_s):
                with self._lock:
                    self._go_on()

    # What the driver's owner passes on, on the scheduler's thread.

    def payload(self, task: Task) -> Sequence[DecodeSequence]:
        """The sequences of a decode task."""
        with self._lock:
            assert task.items[0].request_id == self._step_id, "a decode task is the present step"
            return self._parts[0]

    def on_finish(self, request_id: str, outcome: Outcome, reason: str, result: Finished | None) -> bool:
        """Take the outcome of a request. False when it is not one of this decoder's steps.

        Outcomes of other requests matter too: with the last prompt gone, a paced step enters at once.
        """
        if not request_id.startswith(STEP_PREFIX):
            with self._lock:
                self._go_on()
            return False
        with self._lock:
            if request_id != self._step_id:
                return True  # a step of before `close`
            self._step_id = None
            self._lengths.ended(self._clock.now_s())
            match outcome:
                case "completed":
                    assert isinstance(result, FinishedDecode)
                    self._completed(result.token_ids)
                case "failed":
                    self._failed(reason)
                case "cancelled" | "rejected" | "shed":  # the driver stops
                    self._stop("cancelled", "")
            self._go_on()
        return True

    # With the lock held.

    def _completed(self, token_ids: Sequence[int | None]) -> None:
        part = self._parts[0]
        try:
            self._results += checked_tokens(token_ids, len(part))
        except EngineFailed as error:
            self._results += [StepFailure(detail=str(error))] * len(part)
        self._parts.popleft()

    def _failed(self, reason: str) -> None:
        part = self._parts.popleft()
        if len(part) > 1:  # each sequence alone: only those that fail again end
            self._parts.extendleft((sequence,) for sequence in reversed(part))
        else:
            self._results.append(StepFailure(detail=reason))

    def _go_on(self) -> None:
        """Finish the present step if it is over, start the next one if it is time, tell what happened."""
        if self._step_id is None and self._results and not self._parts:
            self._end_step()
        self._batch.admit()
        if self._step_id is None and not self._parts and self._is_time():
            self._parts.append(self._batch.begin_step())
        if self._step_id is None and self._parts:
            self._submit_part()
        tell(self._listener, self._batch.take_notices())

    def _is_time(self) -> bool:
        """Whether the next step is to enter now; if it is to wait, the pacer is told until when."""
        jobs = self._batch.next_members()
        now_s = self._clock.now_s()
        joins = any(job.request_id not in self._last_token_s and job.first_token_id is None for job in jobs)
        self._last_token_s = {job.request_id: self._last_token_s.get(job.request_id, now_s) for job in jobs}
        self._pace_until_s = None
        targets = [(self._last_token_s[job.request_id], job.tbt_slo_s) for job in jobs]
        assert self._driver is not None, "connect comes before the first submit"
        at_once = joins or self._driver.num_outstanding == 0
        self._timing = self._lengths.timing(targets, now_s, at_once=at_once)
        if self._timing is None:
            return False
        if self._timing.enter_s <= now_s:
            return True
        self._pace_until_s = self._timing.enter_s
        self._pace_wake.set()
        return False

    def _end_step(self) -> None:
        now_s = self._clock.now_s()
        for request_id in self._last_token_s:
            self._last_token_s[request_id] = now_s
        results, self._results = self._results, []
        self._batch.end_step(results)

    def _submit_part(self) -> None:
        part = self._parts[0]
        assert self._timing is not None, "a part belongs to a step whose time has come"
        now_s = self._clock.now_s()
        step = Request(
            request_id=f"{STEP_PREFIX}{next(self._ids)}",
            num_prompt_tokens=len(part),
            arrival_s=now_s,
            deadline_s=self._lengths.deadline_s(self._timing, now_s),
            ttft_slo_s=self._timing.tightest_s,
            slo_class="decode",
            kind="decode",
        )
        self._lengths.entered(now_s)
        assert self._driver is not None, "connect comes before the first submit"
        self._step_id = step.request_id
        try:
            self._driver.submit([step], bounded=False)
        except Unavailable as error:
            self._stop("error", str(error))

    def _stop(self, reason: EndReason, detail: str) -> None:
        with self._lock:
            self._closed = True
            self._step_id = None
            self._parts.clear()
            self._results.clear()
            self._pace_until_s = None
            self._pace_wake.set()
            self._batch.end_all(reason, detail)
            tell(self._listener, self._batch.take_notices())
