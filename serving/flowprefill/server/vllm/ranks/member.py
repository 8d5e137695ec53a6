"""A rank: takes messages from the engine core in order and runs steps in a pool of its own.

The leader's pool is the one that answers: its gate decides when the step pauses, and it agrees with the others first (`gate.py`).
A follower's pool parks a step where the ranks agreed to stop and goes on, or unwinds, as the leader does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from flowprefill.clock import MonotonicClock, Timekeeper
from flowprefill.engines.protocol import Gate, Plan
from flowprefill.execution.collective import LEADER
from flowprefill.execution.pool import TaskEvent, TaskPool
from flowprefill.scheduling.actions import Cancel, Granularity, Preempt, Resume, Task, WithdrawPreempt
from flowprefill.scheduling.events import Completed, Failed, Parked
from flowprefill.server.vllm.ranks.gate import FollowerBoard, LeaderBoard, MeetingGate, telling
from flowprefill.server.vllm.ranks.link import Link
from flowprefill.server.vllm.ranks.messages import (
    Begin,
    Emptied,
    Empty,
    Ended,
    Gathered,
    Leave,
    LetGo,
    Lost,
    News,
    Ready,
    Standing,
    ToRank,
)
from flowprefill.server.vllm.ranks.page import Page, Row

if TYPE_CHECKING:
    from flowprefill.engines.vllm_engine.steps import Step

log = logging.getLogger("vllm.flowprefill")

_ONLY_TICKET = 0
"""A follower's pauses are not the scheduler's: each is answered before the next is asked for."""


class RankEngine(Protocol):
    """What runs steps on this rank. `engines.vllm_engine.steps.StepEngine` is one."""

    @property
    def num_slots(self) -> int: ...

    @property
    def num_points(self) -> Mapping[Granularity, int]: ...

    @property
    def num_meetings(self) -> int:
        """Of the step whose code runs now; asked at its points."""
        ...

    def thread_context(self) -> AbstractContextManager[object]: ...

    def plan(self, task: Task, items: Sequence[Step]) -> Plan: ...

    def run(self, plan: Plan, gate: Gate) -> Sequence[Any]: ...

    def run_empty(self, output: Any) -> Any: ...

    def take_left_behind(self, task_id: int) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankPlan:
    """A plan and whose it is."""

    task_id: int
    slot: int
    plan: Plan

    @property
    def num_points(self) -> int:
        return self.plan.num_points

    @property
    def max_points_between_collectives(self) -> int:
        return self.plan.max_points_between_collectives

    def work_done(self, index: int) -> float:
        return self.plan.work_done(index)


class Member:
    """One rank's side of the engine. Its thread reads; steps run in its pool's threads."""

    def __init__(
        self,
        rank: int,
        link: Link,
        page: Page,
        engine: RankEngine,
        clock: Timekeeper | None = None,
        *,
        run_ahead: int = 0,
    ) -> None:
        self.rank = rank
        self._link = link
        self._page = page
        self._engine = engine
        self._clock = clock or MonotonicClock()
        self._run_ahead = run_ahead
        self._boards: dict[int, LeaderBoard] = {}
        self._results: dict[int, Any] = {}
        self._pool: TaskPool[Step, Any] = TaskPool(_Together(self), self._clock, skip_cancelled=False)
        self._pool.connect(self._happened, self._broke)
        self._reader = threading.Thread(target=self._read, name=f"rank-{rank}-reader", daemon=True)

    def start(self) -> None:
        """Say that this rank is ready, and take messages from now on."""
        self._link.send(
            Ready(rank=self.rank, num_slots=self._engine.num_slots, num_points=dict(self._engine.num_points))
        )
        self._reader.start()

    def tell(self, connector: Any) -> None:
        """The KV connector has news. Any thread's."""
        self._link.send(News(connector=connector))

    def close(self) -> None:
        """Let go of everything; steps under way are given up. More than once is fine. Not from a task's thread."""
        self._link.close()
        if self._reader.is_alive():
            self._reader.join()

    # The reading thread.

    def _read(self) -> None:
        try:
            with self._engine.thread_context():
                for message in self._link.received():
                    if isinstance(message, Leave):
                        self._pool.close()
                        break
                    self._take(message)
        except BaseException as error:  # top of the thread: nobody else would hear of it
            log.exception("rank %d cannot go on", self.rank)
            self._broke(error)
        finally:
            self._give_up()

    def _take(self, message: ToRank) -> None:
        match message:
            case Begin(task=task, step=step):
                if self.rank == LEADER:
                    self._boards[task.task_id] = self._leader_board(task.task_id, step.slot)
                self._pool.submit(task, [step])
            case Preempt(task_id=task_id, ticket=ticket):
                self._pool.preempt(task_id, ticket)
            case WithdrawPreempt(task_id=task_id, ticket=ticket):
                self._pool.withdraw(task_id, ticket)
            case Resume(task_id=task_id):
                self._pool.resume(task_id)
            case Cancel(task_id=task_id):
                self._pool.cancel(task_id)
            case Gathered(task_id=task_id):
                self._boards[task_id].gathered()
            case LetGo(task_id=task_id, unwind=True):
                self._pool.cancel(task_id)
            case LetGo(task_id=task_id):
                self._pool.resume(task_id)
            case Empty(output=output):
                result = self._engine.run_empty(output)
                self._link.send(self._parts(Emptied, result))
            case Leave():
                raise AssertionError("the reading thread ends on it")

    def _leader_board(self, task_id: int, slot: int) -> LeaderBoard:
        def let_go(unwind: bool) -> None:
            self._link.send(LetGo(task_id=task_id, unwind=unwind))

        return LeaderBoard(self._page.row(slot), self._clock.signal(), let_go)

    def _give_up(self) -> None:
        """Nobody is left to talk to: whatever still runs unwinds at its next point."""
        self._pool.stop()
        for board in tuple(self._boards.values()):
            board.gathered()
        self._link.close()

    # Tasks' threads.

    def gate(self, plan: _RankPlan, own: Gate) -> MeetingGate:
        """The gate of a step that begins now; `own` is this pool's."""
        row: Row = self._page.row(plan.slot)
        leads = self.rank == LEADER
        board = self._boards[plan.task_id] if leads else FollowerBoard(row, own, self._parking(plan.task_id))
        return MeetingGate(
            board,
            rank=self.rank,
            own=own,
            num_meetings=lambda: self._engine.num_meetings,
            run_ahead=self._run_ahead,
            at_point=telling(row, plan.plan) if leads else None,
        )

    def _parking(self, task_id: int) -> Callable[[], None]:
        return lambda: self._pool.preempt(task_id, _ONLY_TICKET)

    def keep(self, task_id: int, result: Any) -> None:
        """What a step gave, until its end is reported."""
        self._results[task_id] = result

    def _happened(self, event: TaskEvent) -> None:
        """An event of this rank's pool, under its lock."""
        match event:
            case Parked(task_id=task_id):
                self._link.send(event if self.rank == LEADER else Standing(task_id=task_id))
            case Completed(task_id=task_id):
                self._boards.pop(task_id, None)
                self._link.send(self._parts(Ended, self._results.pop(task_id), event=event))
            case Failed(task_id=task_id):
                self._boards.pop(task_id, None)
                self._results.pop(task_id, None)
                said = self._engine.take_left_behind(task_id)
                self._link.send(Ended(event=event, result=None, connector=said))

    def _parts(self, message: Any, result: Any, **fields: Any) -> Any:
        """The leader's result goes to the core as it is; of the others' only their connector's part does."""
        leads = self.rank == LEADER
        said = None if leads else getattr(result, "kv_connector_output", None)
        return message(result=result if leads else None, connector=said, **fields)

    def _broke(self, error: BaseException) -> None:
        self._link.send(Lost(reason=f"{type(error).__name__}: {error}"))


class _Together:
    """The rank's engine with gates that the ranks share. Implements `execution.worker.TaskEngine`."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._engine = member._engine

    def thread_context(self) -> AbstractContextManager[object]:
        return self._engine.thread_context()

    def plan(self, task: Task, items: Sequence[Step]) -> Plan:
        (step,) = items
        return _RankPlan(task_id=task.task_id, slot=step.slot, plan=self._engine.plan(task, items))

    def run(self, plan: Plan, gate: Gate) -> Sequence[Any]:
        assert isinstance(plan, _RankPlan)
        results = self._engine.run(plan.plan, self._member.gate(plan, gate))
        self._member.keep(plan.task_id, results[0])
        return results
