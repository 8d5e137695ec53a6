"""The execution pool: one thread per task, one baton, exactly one task advances.

1. `submit` and `resume` give the baton to a task. The scheduler calls them only when nobody holds it (after `Parked`,
   `Completed` or `Failed`); anything else is a bug and fails an assertion.
2. A task gives the baton up when it parks, ends or fails, in the critical section in which it posts the event. So
   whoever handles the event finds the baton free.
3. Parked tasks stand inside the engine, each with its own thread, activations and attention metadata. They are
   resumed or cancelled in any order.

All methods are called by the scheduler's thread, except `close`, which its owner calls after that thread has ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Generic, TypeAlias, cast

from flowprefill.clock import Timekeeper
from flowprefill.engines.protocol import DecodeSequence, Engine, Gate, Plan, PrefillItem
from flowprefill.execution.run import ItemT, Run
from flowprefill.execution.worker import ResultT, TaskEngine, Worker
from flowprefill.scheduling.actions import Task
from flowprefill.scheduling.events import Completed, Failed, Parked, Progress

log = logging.getLogger(__name__)

TaskEvent: TypeAlias = Parked | Completed | Failed
Item: TypeAlias = PrefillItem | DecodeSequence
Items: TypeAlias = Sequence[PrefillItem] | Sequence[DecodeSequence]
Results: TypeAlias = tuple[int | None, ...]

JOIN_TIMEOUT_S = 60.0
"""How long `close` waits for one thread to reach a preemption point and end."""


class TaskPool(Generic[ItemT, ResultT]):
    """Runs the scheduler's tasks on one engine, whatever it calls an item and a result."""

    def __init__(
        self,
        engine: TaskEngine[ItemT, ResultT],
        clock: Timekeeper,
        post: Callable[[TaskEvent], None] | None = None,
        *,
        max_idle_threads: int = 8,
        skip_cancelled: bool = True,
    ) -> None:
        """`post` takes the tasks' events from their threads and never blocks; a driver sets it by `connect`.

        A thread that ends its task waits for the next one, unless `max_idle_threads` wait already. How many
        live at once is bounded by the scheduler's `max_suspended`. `skip_cancelled=False` also runs a task that was
        cancelled before it began, up to its first point: for engines that must hear of every batch.
        """
        self._engine = engine
        self._clock = clock
        self._post = post
        self._on_broken: Callable[[BaseException], None] | None = None
        self._max_idle_threads = max_idle_threads
        self._skip_cancelled = skip_cancelled
        self._lock = threading.Lock()
        self._runs: dict[int, Run[ItemT]] = {}
        self._holder: Run[ItemT] | None = None
        self._results: dict[int, tuple[ResultT, ...]] = {}
        self._workers: set[Worker[ItemT, ResultT]] = set()
        self._idle: list[Worker[ItemT, ResultT]] = []
        self._closing = False
        self._num_started = 0

    def connect(
        self, post: Callable[[TaskEvent], None], on_broken: Callable[[BaseException], None] | None = None
    ) -> None:
        """Say where the tasks' events go, and errors of the pool itself; before the first `submit`."""
        self._post = post
        self._on_broken = on_broken

    # What the scheduler's thread calls.

    def submit(self, task: Task, items: Sequence[ItemT]) -> None:
        """Start `task` over `items`, one per item of the task and in its order. It has the baton at once."""
        with self._lock:
            assert not self._closing, "a closed pool takes no tasks"
            assert self._holder is None, f"task {self._holder.task.task_id} holds the baton; cannot submit"
            assert task.task_id not in self._runs, f"task {task.task_id} runs already"
            worker = self._idle.pop() if self._idle else self._start_worker()
            run = Run(task, items, self._lock, worker.wake, on_park=self._parked)
            self._runs[task.task_id] = run
            self._give_baton(run)
            worker.give(run)

    def preempt(self, task_id: int, ticket: int) -> None:
        """Ask the task to park; `Parked(ticket)` answers, or `Completed` when it ends first.

        A task that stands parked already (its answer to a withdrawn request is still under way) answers at once.
        """
        with self._lock:
            run = self._runs.get(task_id)
            if run is None:
                return
            if run.gate.parked:
                self._emit(Parked(task_id=task_id, ticket=ticket, progress=run.progress()))
            else:
                run.gate.request(ticket)

    def withdraw(self, task_id: int, ticket: int) -> None:
        """Take the pause request back, if it is not answered yet."""
        with self._lock:
            run = self._runs.get(task_id)
            if run is not None:
                run.gate.withdraw(ticket)

    def resume(self, task_id: int) -> None:
        """Give the baton back to a parked task."""
        with self._lock:
            assert self._holder is None, f"task {self._holder.task.task_id} holds the baton; cannot resume"
            run = self._runs[task_id]
            self._give_baton(run)
            run.gate.resume()

    def cancel(self, task_id: int) -> None:
        """Unwind the task; `Failed(error=None)` answers, or `Completed` when it ends first. Unknown ids are ignored."""
        with self._lock:
            run = self._runs.get(task_id)
            if run is not None:
                run.gate.cancel()

    def progress(self) -> Progress | None:
        """How far the task with the baton has come; None when nobody holds it."""
        with self._lock:
            run = self._holder
            return None if run is None else run.progress(self._clock.now_s())

    def take_results(self, task_id: int) -> tuple[ResultT, ...]:
        """The results of a completed task, one per item. Once."""
        with self._lock:
            return self._results.pop(task_id)

    @property
    def num_threads(self) -> int:
        """Threads alive now: running, parked, unwinding and idle."""
        with self._lock:
            return len(self._workers)

    def stop(self) -> None:
        """Cancel every task and let every thread end, without waiting for them. Nothing is submitted afterwards."""
        with self._lock:
            self._closing = True
            for run in self._runs.values():
                run.gate.cancel()
            for worker in self._workers:
                worker.stop()

    def close(self) -> None:
        """Unwind every task and join every thread. Not from a task's thread."""
        self.stop()
        with self._lock:
            workers = tuple(self._workers)
        for worker in workers:
            if not worker.join(JOIN_TIMEOUT_S):
                log.error(
                    "a task's thread did not reach a preemption point in time",
                    extra={"task_thread": worker.name, "waited_s": JOIN_TIMEOUT_S},
                )

    # What the tasks' threads call.

    def _parked(self, run: Run[ItemT], ticket: int) -> None:
        """`run` parks; the lock is held."""
        self._take_baton(run)
        self._emit(Parked(task_id=run.task.task_id, ticket=ticket, progress=run.progress()))

    def _ended(
        self,
        run: Run[ItemT],
        worker: Worker[ItemT, ResultT],
        results: tuple[ResultT, ...] | None,
        error: str | None,
    ) -> bool:
        """`run` has ended in `worker`'s thread. True when the thread is to wait for another task."""
        with self._lock:
            if self._holder is run:  # a task that unwound from a park has no baton
                self._take_baton(run)
            task_id = run.task.task_id
            del self._runs[task_id]
            if results is not None:
                self._results[task_id] = results
                self._emit(Completed(task_id=task_id, executed_s=run.executed_s))
            else:
                self._emit(Failed(task_id=task_id, error=error, executed_s=run.executed_s))
            keep = not self._closing and len(self._idle) < self._max_idle_threads
            if keep:
                self._idle.append(worker)
            else:
                self._workers.discard(worker)
            return keep

    def _gone(self, worker: Worker[ItemT, ResultT]) -> None:
        """`worker`'s thread ends."""
        with self._lock:
            self._workers.discard(worker)
            if worker in self._idle:
                self._idle.remove(worker)

    def _broken(self, error: BaseException) -> None:
        """A task's thread ends through an error that is not the engine's."""
        if self._on_broken is not None:
            self._on_broken(error)

    # With the lock held.

    def _start_worker(self) -> Worker[ItemT, ResultT]:
        self._num_started += 1
        worker = Worker(
            self._engine,
            self._clock,
            f"task-thread-{self._num_started}",
            ended=self._ended,
            gone=self._gone,
            broken=self._broken,
            skip_cancelled=self._skip_cancelled,
        )
        self._workers.add(worker)
        return worker

    def _give_baton(self, run: Run[ItemT]) -> None:
        self._holder = run
        run.stint_began_s = self._clock.now_s()

    def _take_baton(self, run: Run[ItemT]) -> None:
        assert self._holder is run, f"task {run.task.task_id} advanced without the baton"
        assert run.stint_began_s is not None
        self._holder = None
        run.executed_s += self._clock.now_s() - run.stint_began_s
        run.stint_began_s = None

    def _emit(self, event: TaskEvent) -> None:
        if self._post is not None:
            self._post(event)


class ExecutionPool(TaskPool[Item, int | None]):
    """Runs the scheduler's tasks on an `Engine`; results are the next tokens, None where none was asked for."""

    def __init__(
        self,
        engine: Engine,
        clock: Timekeeper,
        post: Callable[[TaskEvent], None] | None = None,
        *,
        max_idle_threads: int = 8,
    ) -> None:
        super().__init__(_Planned(engine), clock, post, max_idle_threads=max_idle_threads)


class _Planned:
    """An `Engine` as the pool drives it: the task's kind chooses the plan."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def thread_context(self) -> AbstractContextManager[object]:
        return self._engine.thread_context()

    def plan(self, task: Task, items: Sequence[Item]) -> Plan:
        match task.kind:
            case "prefill":
                return self._engine.plan_prefill(cast(Sequence[PrefillItem], items), task.granularity)
            case "decode":
                return self._engine.plan_decode(cast(Sequence[DecodeSequence], items))

    def run(self, plan: Plan, gate: Gate) -> Sequence[int | None]:
        return self._engine.run(plan, gate)
