"""Pools of steps over an engine that computes nothing: in one process, and on ranks that are threads over real sockets.

A step runs until the test lets it finish, with a collective of all ranks before each of its points. `Stage` is a pool with everything
around it; whatever it waits for comes by condition.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from flowprefill.clock import MonotonicClock
from flowprefill.engines.protocol import Gate, Plan
from flowprefill.execution.pool import TaskEvent, TaskPool
from flowprefill.scheduling.actions import Granularity, Task, TaskItem
from flowprefill.server.vllm.ranks.connectors import ConnectorReports
from flowprefill.server.vllm.ranks.gathering import Gathering
from flowprefill.server.vllm.ranks.link import Link
from flowprefill.server.vllm.ranks.member import Member
from flowprefill.server.vllm.ranks.page import Page, PageShape, new_page
from flowprefill.server.vllm.ranks.pool import RankedPool
from flowprefill.server.vllm.step_pool import StepPool

WAIT_S = 20.0
NUM_SLOTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeStep:
    """A step called `name`. It raises on `fails_on` (ranks) at its first point."""

    name: str
    slot: int
    fails_on: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FakePlan:
    task_id: int
    step: FakeStep
    num_points: int = 1_000_000
    max_points_between_collectives: int = 1

    def work_done(self, index: int) -> float:
        return index / self.num_points


class Stopped(Exception):
    """The collective will never come about."""


class Collective:
    """What holds ranks together. The leader says in it whether this point is the step's last."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._changed = threading.Condition()
        self._entered: dict[tuple[str, int], int] = {}
        self._last: set[tuple[str, int]] = set()
        self._finishing: set[str] = set()
        self._stopped = False
        self.started: set[str] = set()

    def enter(self, rank: int, name: str, index: int) -> bool:
        """Wait for all ranks; whether the step ends with this point."""
        place = name, index
        with self._changed:
            self.started.add(name)
            self._entered[place] = self._entered.get(place, 0) + 1
            if rank == 0 and name in self._finishing:
                self._last.add(place)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stopped or self._entered[place] == self._num_ranks)
            if self._stopped:
                raise Stopped
            return place in self._last

    def finish(self, name: str) -> None:
        with self._changed:
            self._finishing.add(name)

    def wait_started(self, name: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: name in self.started, WAIT_S), f"{name} did not start"

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class FakeEngine:
    """Runs steps on one rank. `passed` are the points in order of passing."""

    def __init__(self, rank: int, collective: Collective) -> None:
        self.rank = rank
        self.passed: list[tuple[str, int]] = []
        self.unwound: list[str] = []
        self.num_slots = NUM_SLOTS
        self.num_points: Mapping[Granularity, int] = {"operator": 1_000_000, "layer": 1_000_000}
        self._collective = collective
        self._met = threading.local()

    @property
    def num_meetings(self) -> int:
        return int(self._met.count)

    def thread_context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def plan(self, task: Task, items: Sequence[Any]) -> Plan:
        (step,) = items
        return FakePlan(task_id=task.task_id, step=step)

    def run(self, plan: Plan, gate: Gate) -> Sequence[Any]:
        assert isinstance(plan, FakePlan)
        try:
            return (self._run(plan.step, gate),)
        except BaseException:
            self.unwound.append(plan.step.name)
            raise

    def _run(self, step: FakeStep, gate: Gate) -> Any:
        for index in range(1_000_000):
            last = self._collective.enter(self.rank, step.name, index)
            self._met.count = index + 1
            if self.rank in step.fails_on:
                raise RuntimeError(f"{step.name} broke")
            gate.index = index
            if gate.raised:
                gate.pause(index)
            self.passed.append((step.name, index))
            if last:
                break
        said = f"{step.name} sent by {self.rank}"
        return SimpleNamespace(name=step.name, kv_connector_output=said)

    def run_empty(self, output: Any) -> Any:
        return SimpleNamespace(name=output.name, kv_connector_output=f"empty {self.rank}")

    def take_left_behind(self, task_id: int) -> Any:
        return f"left by {self.rank}"


class JoiningAggregator:
    """Stands for vLLM's: joins what was said, in order of rank."""

    def aggregate(self, outputs: list[Any], output_rank: int = 0) -> Any:
        said = [output.kv_connector_output for output in outputs if output.kv_connector_output is not None]
        outputs[output_rank].kv_connector_output = " + ".join(said)
        return outputs[output_rank]


class Stage:
    """A pool over `num_ranks` fake engines; one is a `TaskPool`, more are a `RankedPool`."""

    def __init__(self, num_ranks: int) -> None:
        self.collective = Collective(num_ranks)
        self.engines = [FakeEngine(rank, self.collective) for rank in range(num_ranks)]
        self.broken: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.members: list[Member] = []
        self._events: queue.SimpleQueue[TaskEvent] = queue.SimpleQueue()
        self._threads_before = set(threading.enumerate())
        self.pool: StepPool
        if num_ranks == 1:
            self.pool = TaskPool(self.engines[0], MonotonicClock(), skip_cancelled=False)
        else:
            self.pool = self.ranked = self._ranked()
        self.pool.connect(self._events.put, self.broken.put)

    def submit(self, task_id: int, name: str, *, fails_on: tuple[int, ...] = ()) -> None:
        item = TaskItem(request_id=name, start=0, num_tokens=1, block_ids=(), completes=True)
        step: Any = FakeStep(name=name, slot=task_id % NUM_SLOTS, fails_on=fails_on)
        self.pool.submit(Task(task_id=task_id, items=(item,), predicted_s=1.0), [step])

    def event(self) -> TaskEvent:
        """The next thing that happens."""
        return self._events.get(timeout=WAIT_S)

    @property
    def nothing_more(self) -> bool:
        return self._events.empty()

    def finish(self, name: str) -> None:
        """Let the step end at its next point."""
        self.collective.finish(name)

    def close(self) -> list[threading.Thread]:
        """Close the pool; threads that are left."""
        self.pool.close()
        for member in self.members:
            member.close()
        ours = [thread for thread in threading.enumerate() if thread not in self._threads_before]
        for thread in ours:
            thread.join(WAIT_S)
        return [thread for thread in ours if thread.is_alive()]

    def _ranked(self) -> RankedPool:
        num_ranks = len(self.engines)
        shape = PageShape(num_slots=NUM_SLOTS, num_ranks=num_ranks)
        page, descriptor = new_page(shape)
        pairs = [socket.socketpair() for _ in self.engines]
        self.members = [
            Member(engine.rank, Link(theirs), Page(shape, descriptor), engine)
            for engine, (_, theirs) in zip(self.engines, pairs, strict=True)
        ]
        for member in self.members:
            member.start()
        links = [Link(ours) for ours, _ in pairs]
        gathering = Gathering(links=links, page=page, ready=[link.first() for link in links])
        return RankedPool(
            gathering.links,
            gathering.page,
            gathering.ready,
            ConnectorReports(JoiningAggregator()),
            MonotonicClock(),
        )
