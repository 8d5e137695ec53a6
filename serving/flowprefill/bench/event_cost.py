"""What a scheduling event costs with many requests waiting, in CPU time."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterator

from flowprefill.request import Request
from flowprefill.scheduling.actions import Preempt, Resume, Submit, Task, WithdrawPreempt
from flowprefill.scheduling.events import (
    Arrival,
    Cancelled,
    CapacityFreed,
    Completed,
    Event,
    Parked,
    Progress,
)
from flowprefill.scheduling.kv import KVCachePool
from flowprefill.scheduling.predictor import Predictor
from flowprefill.scheduling.scheduler import Scheduler
from flowprefill.scheduling.settings import PolicyName, SchedulerSettings

_COEFFICIENTS = (0.0202, 52.4e-6, 3.02e-9, 6.04e-9)  # an 8B model on an A800, for seconds and tokens
_BLOCK_SIZE = 16
_SLICES = 5


def event_cost_s(policy: PolicyName, waiting: int, *, events: int = 2000) -> float:
    """CPU seconds of one `Scheduler.handle` while about `waiting` requests wait.

    The mean over mixed events (arrivals, pauses, completions, cancellations from the middle, freed KV) in the median
    of five slices, garbage collection off, after a tenth of them unmeasured.
    """
    load = _Load(policy, waiting)
    steps = load.events()
    for _ in range(events // 10):
        load.handle(next(steps))
    per_slice = events // _SLICES
    slices: list[float] = []
    gc.collect()
    gc.disable()
    try:
        slices.extend(
            sum(load.handle(next(steps)) for _ in range(per_slice)) / per_slice for _ in range(_SLICES)
        )
    finally:
        gc.enable()
    return statistics.median(slices)


class _Load:
    """Events around a scheduler that keep a steady number of requests waiting, and the engine's side of the talk.

    Seven short prompts with tight targets to three long ones with loose targets. Their deadlines lie evenly from long
    lost to far ahead, so that slack expires all the time; the pace of the engine wavers, so that predictions
    are corrected all the time.
    """

    def __init__(self, policy: PolicyName, waiting: int) -> None:
        self._scheduler = Scheduler(
            SchedulerSettings(policy=policy, queue_limit=2 * waiting + 100),
            KVCachePool(1_000_000, _BLOCK_SIZE),
            Predictor(_COEFFICIENTS),
        )
        self._random = random.Random(7)
        self._target = waiting
        self._now_s = 1000.0
        self._count = 0
        self._waiting: list[str] = []
        self._position: dict[str, int] = {}
        self._running: Task | None = None
        self._parked: dict[int, Task] = {}
        self._pending: Preempt | None = None
        while len(self._waiting) < waiting:
            self.handle(self._arrival())

    def events(self) -> Iterator[Event]:
        """Events without end, each fit for the state it meets."""
        while True:
            self._now_s += self._random.expovariate(50.0)
            yield self._arrival()
            if self._random.random() < 0.5:
                yield self._cancellation()
            if self._pending is not None:
                yield Parked(
                    task_id=self._pending.task_id, ticket=self._pending.ticket, progress=self._progress()
                )
            elif self._running is not None:
                task = self._running
                executed_s = task.predicted_s * self._random.lognormvariate(0.0, 0.1)
                self._now_s += executed_s
                yield Completed(task_id=task.task_id, executed_s=executed_s)
                yield CapacityFreed(request_ids=tuple(item.request_id for item in task.items))
            while len(self._waiting) < self._target:
                yield self._arrival()
            while len(self._waiting) > self._target:
                yield self._cancellation()

    def handle(self, event: Event) -> float:
        """Let the scheduler handle the event and carry out what it says; the CPU seconds of the former."""
        started_s = time.process_time()
        actions = self._scheduler.handle(event, self._now_s)
        spent_s = time.process_time() - started_s
        if isinstance(event, Completed):
            self._running = self._pending = None
        elif isinstance(event, Parked) and self._running is not None:
            self._parked[event.task_id] = self._running
            self._running = self._pending = None
        for action in actions:
            match action:
                case Submit(task=task):
                    self._running = task
                    for item in task.items:
                        self._forget(item.request_id)
                case Resume(task_id=task_id):
                    self._running = self._parked.pop(task_id)
                case Preempt():
                    self._pending = action
                case WithdrawPreempt():
                    self._pending = None
        return spent_s

    def _progress(self) -> Progress | None:
        task = self._running
        if task is None:
            return None
        return Progress(task_id=task.task_id, work_done=0.5, executed_s=0.5 * task.predicted_s)

    def _arrival(self) -> Arrival:
        short = self._random.random() < 0.7
        slo_s = 0.25 if short else 4.0
        self._count += 1
        request = Request(
            request_id=f"request-{self._count}",
            num_prompt_tokens=self._random.randint(64, 1024) if short else self._random.randint(2048, 12_000),
            arrival_s=self._now_s,
            deadline_s=self._now_s + self._random.uniform(-30.0, 30.0),
            ttft_slo_s=slo_s,
            weight=self._random.choice((1.0, 1.0, 2.0)),
        )
        self._position[request.request_id] = len(self._waiting)
        self._waiting.append(request.request_id)
        return Arrival(requests=(request,), progress=self._progress())

    def _cancellation(self) -> Cancelled:
        request_id = self._waiting[self._random.randrange(len(self._waiting))]
        self._forget(request_id)
        return Cancelled(request_id=request_id, progress=self._progress())

    def _forget(self, request_id: str) -> None:
        """The request waits no more: the last one takes its place in the list."""
        position = self._position.pop(request_id)
        last = self._waiting.pop()
        if last != request_id:
            self._waiting[position] = last
            self._position[last] = position
