"""One thread that runs tasks, one after the other, and stands still while its task is parked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Generic, Protocol, TypeVar

from flowprefill.clock import Timekeeper
from flowprefill.engines.protocol import EngineBroken, Gate, Plan, TaskUnwound
from flowprefill.errors import EngineFailed
from flowprefill.execution.run import ItemT, Run
from flowprefill.scheduling.actions import Task

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
_ItemIn = TypeVar("_ItemIn", contravariant=True)
_ResultOut = TypeVar("_ResultOut", covariant=True)


class TaskEngine(Protocol[_ItemIn, _ResultOut]):
    """What a pool needs of an engine; see `engines.protocol.Engine` for the rules."""

    def thread_context(self) -> AbstractContextManager[object]:
        """What every thread that calls `plan` or `run` enters once, for its whole life."""
        ...

    def plan(self, task: Task, items: Sequence[_ItemIn]) -> Plan:
        """Lay out the task's batch. Runs nothing."""
        ...

    def run(self, plan: Plan, gate: Gate) -> Sequence[_ResultOut]:
        """Run to the end, calling the gate at every point; one result per item."""
        ...


Ended = Callable[[Run[ItemT], "Worker[ItemT, ResultT]", tuple[ResultT, ...] | None, str | None], bool]


class Worker(Generic[ItemT, ResultT]):
    """A task thread of the pool, with the engine's thread-local settings in force for its whole life."""

    def __init__(
        self,
        engine: TaskEngine[ItemT, ResultT],
        clock: Timekeeper,
        name: str,
        *,
        ended: Ended[ItemT, ResultT],
        gone: Callable[[Worker[ItemT, ResultT]], None],
        broken: Callable[[BaseException], None],
        skip_cancelled: bool = True,
    ) -> None:
        """Start the thread.

        `ended` takes each task's end and says whether to wait for another. `broken` takes an error that is not
        the engine's. `gone` is the thread's last call.
        """
        self.name = name
        self.wake = clock.signal()
        self._engine = engine
        self._ended = ended
        self._gone = gone
        self._broken = broken
        self._skip_cancelled = skip_cancelled
        self._next: Run[ItemT] | None = None
        self._stopping = False
        self._thread = clock.start_thread(self._main, name=name)

    def give(self, run: Run[ItemT]) -> None:
        """Run this task now; the thread must be idle."""
        assert self._next is None, f"{self.name} has a task already"
        self._next = run
        self.wake.set()

    def stop(self) -> None:
        """End the thread once its present task has ended."""
        self._stopping = True
        self.wake.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; False when it did not come in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            with ExitStack() as stack:
                try:
                    stack.enter_context(self._engine.thread_context())
                except Exception as error:  # nothing can run in this thread: its first task fails
                    log.exception("a task thread could not be set up", extra={"task_thread": self.name})
                    self._fail_next(error)
                    return
                while (run := self._wait()) is not None and self._execute(run):
                    del run
        except BaseException as error:  # top of the thread: a bug of ours, which must not pass in silence
            log.exception("a task thread broke", extra={"task_thread": self.name})
            self._broken(error)
        finally:
            self._gone(self)

    def _fail_next(self, error: Exception) -> None:
        run = self._wait()
        if run is not None:
            self._stopping = True
            self._ended(run, self, None, _failure(run, error))

    def _wait(self) -> Run[ItemT] | None:
        while self._next is None:
            if self._stopping:
                return None
            self.wake.wait()
        run, self._next = self._next, None
        return run

    def _execute(self, run: Run[ItemT]) -> bool:
        results: tuple[ResultT, ...] | None = None
        error_text: str | None = None
        try:
            if self._skip_cancelled:
                run.gate.check_cancelled()
            run.plan = self._engine.plan(run.task, run.items)
            results = tuple(self._engine.run(run.plan, run.gate))
        except TaskUnwound:
            if not run.gate.cancelled:
                error_text = "the engine unwound a task that nobody cancelled"
        except EngineBroken:
            raise  # fatal, and not for this task alone
        except BaseException as error:  # top of a task: whatever the model raises fails this task alone
            log.exception("the engine failed", extra={"task_id": run.task.task_id})
            error_text = _failure(run, error)
        keep = self._ended(run, self, results, error_text)
        run.forget()
        return keep


def _failure(run: Run[ItemT], error: BaseException) -> str:
    num_requests = len(run.task.items)
    shown = str(error) or "no message"
    return str(
        EngineFailed(f"the engine failed in a batch of {num_requests}: {type(error).__name__}: {shown}")
    )
