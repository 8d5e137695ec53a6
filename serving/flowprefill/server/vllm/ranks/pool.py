"""The execution pool when steps run on several ranks: what `execution.pool.TaskPool` is for one.

1. A step begins on all ranks at once, and pauses and goes on by its leader's word (`member.py`).
2. Its end is reported once *every* rank has told of it, so what runs next finds all of them free.
3. The ranks of a step end alike. When one fails and the others have not ended in time, or they end differently, nothing can bring
   them together again: the engine is lost, as it is when a rank's process ends.

`submit` and the like are called by the scheduler's thread; one thread a rank reads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowprefill.clock import Clock
from flowprefill.execution.collective import LEADER
from flowprefill.execution.pool import TaskEvent
from flowprefill.scheduling.actions import Cancel, Granularity, Preempt, Resume, Task, WithdrawPreempt
from flowprefill.scheduling.events import Completed, Failed, Parked, Progress
from flowprefill.server.vllm.ranks.connectors import ConnectorReports
from flowprefill.server.vllm.ranks.crew import Crew, RanksLost
from flowprefill.server.vllm.ranks.flight import Flight, failure, outcome
from flowprefill.server.vllm.ranks.link import Link
from flowprefill.server.vllm.ranks.messages import (
    Begin,
    Emptied,
    Empty,
    Ended,
    FromRank,
    Gathered,
    LetGo,
    Lost,
    News,
    Ready,
    Standing,
)
from flowprefill.server.vllm.ranks.page import Page

if TYPE_CHECKING:
    from flowprefill.engines.vllm_engine.steps import Step

log = logging.getLogger("vllm.flowprefill")

CLOSE_TIMEOUT_S = 60.0
"""How long `close` waits for steps to unwind."""

STRAGGLER_TIMEOUT_S = 30.0
"""How long the other ranks may take to end a step that has failed on one."""

EMPTY_STEP_TIMEOUT_S = 120.0


class RankedPool:
    """Runs steps on all ranks. Also carries steps without tokens to them and what their KV connectors say back."""

    def __init__(
        self,
        links: Sequence[Link],
        page: Page,
        ready: Sequence[Ready],
        reports: ConnectorReports,
        clock: Clock,
    ) -> None:
        """`links` and `ready` in order of rank. Takes the links and the page over, and closes them."""
        self._page = page
        self._ready = ready
        self._reports = reports
        self._clock = clock
        self._post: Callable[[TaskEvent], None] = lambda event: None
        self._on_broken: Callable[[BaseException], None] = lambda error: None
        self._on_news: Callable[[Any], None] = lambda news: None
        self._state = threading.Condition()
        self._flights: dict[int, Flight] = {}
        self._holder: Flight | None = None
        self._results: dict[int, tuple[Any, ...]] = {}
        self._left_behind: dict[int, Any] = {}
        self._emptied: dict[int, Emptied] = {}
        self._closing = False
        self._crew = Crew(links, self._take, self._lost)
        self._crew.start()

    def connect(
        self, post: Callable[[TaskEvent], None], on_broken: Callable[[BaseException], None] | None = None
    ) -> None:
        """Say where the tasks' events go, and that the ranks are lost."""
        self._post = post
        if on_broken is not None:
            self._on_broken = on_broken
            if self._crew.lost is not None:
                on_broken(self._crew.lost)

    def connect_news(self, on_news: Callable[[Any], None]) -> None:
        """Say where word of KV transfers goes that ended while a step ran. Called on a reading thread."""
        self._on_news = on_news

    @property
    def num_ranks(self) -> int:
        return self._crew.size

    @property
    def num_slots(self) -> int:
        """Steps that can be in flight."""
        return min(ready.num_slots for ready in self._ready)

    @property
    def num_points(self) -> Mapping[Granularity, int]:
        """Points of one forward, alike on every rank."""
        return self._ready[LEADER].num_points

    # The scheduler's thread.

    def submit(self, task: Task, items: Sequence[Step]) -> None:
        """Start the step on every rank; the slot that it names must be free. It has the baton at once."""
        (step,) = items
        with self._state:
            assert not self._closing, "a closed pool takes no tasks"
            assert self._holder is None, f"task {self._holder.task.task_id} holds the baton; cannot submit"
            assert task.task_id not in self._flights, f"task {task.task_id} runs already"
            flight = self._flights[task.task_id] = Flight(task=task, slot=step.slot)
            self._page.row(step.slot).reset()
            self._give_baton(flight)
        self._crew.to_all(Begin(task=task, step=step))

    def preempt(self, task_id: int, ticket: int) -> None:
        """Ask the step to park; `Parked(ticket)` answers, or `Completed` when it ends first."""
        self._crew.to_leader(Preempt(task_id=task_id, ticket=ticket))

    def withdraw(self, task_id: int, ticket: int) -> None:
        """Take the pause request back, if it is not answered yet."""
        self._crew.to_leader(WithdrawPreempt(task_id=task_id, ticket=ticket))

    def resume(self, task_id: int) -> None:
        """Give the baton back to a parked step."""
        with self._state:
            assert self._holder is None, f"task {self._holder.task.task_id} holds the baton; cannot resume"
            self._give_baton(self._flights[task_id])
        self._crew.to_leader(Resume(task_id=task_id))

    def cancel(self, task_id: int) -> None:
        """Unwind the step; `Failed(error=None)` answers, or `Completed` when it ends first. Unknown ids are ignored."""
        self._crew.to_leader(Cancel(task_id=task_id))

    def progress(self) -> Progress | None:
        """How far the step with the baton has come; None when nobody holds it."""
        with self._state:
            flight = self._holder
            if flight is None or flight.stint_began_s is None:
                return None
            return Progress(
                task_id=flight.task.task_id,
                work_done=self._page.row(flight.slot).work_done,
                executed_s=flight.executed_s + self._clock.now_s() - flight.stint_began_s,
            )

    def take_results(self, task_id: int) -> tuple[Any, ...]:
        """The result of a completed step, with what every rank's KV connector said. Once."""
        with self._state:
            return self._results.pop(task_id)

    def take_left_behind(self, task_id: int) -> Any:
        """What the KV connectors said in a step that did not end; None when they said nothing. Once."""
        with self._state:
            return self._left_behind.pop(task_id, None)

    def run_empty(self, output: Any) -> Any:
        """A step without tokens on every rank; only when no task advances. Its result.

        Raises RanksLost when a rank has gone, or does not answer.
        """
        assert output.total_num_scheduled_tokens == 0, "an empty step has no tokens"
        with self._state:
            assert self._holder is None, f"task {self._holder.task.task_id} advances"
            self._emptied.clear()
        self._crew.to_all(Empty(output=output))
        with self._state:
            answered = self._state.wait_for(
                lambda: self._crew.lost is not None or len(self._emptied) == self.num_ranks,
                EMPTY_STEP_TIMEOUT_S,
            )
            if self._crew.lost is not None:
                raise self._crew.lost
            if not answered:
                raise RanksLost(
                    f"only ranks {sorted(self._emptied)} of {self.num_ranks} ran an empty step in {EMPTY_STEP_TIMEOUT_S:.0f} s"
                )
            by_rank = [self._emptied[rank] for rank in range(self.num_ranks)]
        return self._reports.result(by_rank)

    def close(self) -> None:
        """Unwind every step, let the ranks end and join every thread. More than once is fine."""
        with self._state:
            first, self._closing = not self._closing, True
            under_way = tuple(self._flights)
        if first:
            for task_id in under_way:
                self.cancel(task_id)
            with self._state:
                unwound = self._state.wait_for(
                    lambda: not self._flights or self._crew.lost is not None, CLOSE_TIMEOUT_S
                )
                if not unwound:
                    log.error("steps did not unwind in %.0f s: %s", CLOSE_TIMEOUT_S, sorted(self._flights))
                for flight in self._flights.values():
                    if flight.straggling is not None:
                        flight.straggling.cancel()
        self._crew.close()
        if first:
            self._page.close()

    # The reading threads.

    def _take(self, rank: int, message: FromRank) -> None:
        match message:
            case Parked():
                self._parked(message)
            case Standing(task_id=task_id):
                self._stands(rank, task_id)
            case LetGo():
                self._crew.to_followers(message)
            case Ended():
                self._ended(rank, message)
            case Emptied():
                with self._state:
                    self._emptied[rank] = message
                    self._state.notify_all()
            case News(connector=connector):
                self._news(rank, connector)
            case Ready() | Lost():
                raise AssertionError(f"{message} is not for the pool")

    def _parked(self, event: Parked) -> None:
        with self._state:
            flight = self._flights[event.task_id]
            self._take_baton(flight)
            assert event.progress is not None, "a park tells its progress"
            flight.executed_s = event.progress.executed_s
            self._post(event)

    def _stands(self, rank: int, task_id: int) -> None:
        with self._state:
            standing = self._flights[task_id].standing
            standing.add(rank)
            if len(standing) < self.num_ranks - 1:
                return
            standing.clear()
        self._crew.to_leader(Gathered(task_id=task_id))

    def _ended(self, rank: int, ended: Ended) -> None:
        task_id = ended.event.task_id
        with self._state:
            flight = self._flights[task_id]
            flight.ended[rank] = ended
            if len(flight.ended) == self.num_ranks:
                self._all_ended(flight)
            elif (error := failure(ended)) is not None:
                self._expect_others(flight, f"rank {rank} failed: {error}")

    def _all_ended(self, flight: Flight) -> None:
        """With the lock."""
        task_id = flight.task.task_id
        by_rank = [flight.ended[rank] for rank in range(self.num_ranks)]
        if flight.straggling is not None:
            flight.straggling.cancel()
        event = outcome(by_rank)
        match event:
            case None:
                events = [ended.event for ended in by_rank]
                self._crew.lose(f"the ranks ended task {task_id} differently: {events}")
                return
            case Completed():
                self._results[task_id] = (self._reports.result(by_rank),)
            case Failed():
                self._left_behind[task_id] = self._reports.left_behind(by_rank)
        if self._holder is flight:
            self._take_baton(flight)
        del self._flights[task_id]
        self._state.notify_all()
        self._post(event)

    def _expect_others(self, flight: Flight, reason: str) -> None:
        """With the lock. A collective that one rank does not enter holds the others forever."""
        if flight.straggling is None:
            flight.straggling = threading.Timer(
                STRAGGLER_TIMEOUT_S, self._crew.lose, args=(f"{reason}, and others have not ended the step",)
            )
            flight.straggling.daemon = True
            flight.straggling.start()

    def _news(self, rank: int, connector: Any) -> None:
        said = self._reports.news(rank, connector, self.num_ranks)
        if said is not None:
            self._on_news(said)

    def _lost(self, error: RanksLost) -> None:
        with self._state:
            self._state.notify_all()
        self._on_broken(error)

    def _give_baton(self, flight: Flight) -> None:
        self._holder = flight
        flight.stint_began_s = self._clock.now_s()

    def _take_baton(self, flight: Flight) -> None:
        assert self._holder is flight, f"task {flight.task.task_id} advanced without the baton"
        self._holder = None
        flight.stint_began_s = None
