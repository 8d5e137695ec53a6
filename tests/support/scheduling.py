"""A virtual engine and clock around a scheduler, and short ways to write requests.

The engine is as awkward as a real one is allowed to be: pauses take time, tasks may end first, and what happens in
it reaches the scheduler through a mailbox with a delay, so that answers cross with new questions. It checks the
rules of the action protocol as it goes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from flowprefill.request import Request
from flowprefill.scheduling.actions import (
    Action,
    Cancel,
    Finish,
    Preempt,
    Resume,
    Submit,
    Task,
    WithdrawPreempt,
)
from flowprefill.scheduling.events import (
    Arrival,
    Cancelled,
    CapacityFreed,
    Completed,
    Event,
    Failed,
    Parked,
    Progress,
    Reconfigured,
    Tick,
)
from flowprefill.scheduling.kv import KVCachePool
from flowprefill.scheduling.predictor import Predictor
from flowprefill.scheduling.scheduler import Scheduler
from flowprefill.scheduling.settings import SchedulerSettings

A = TypeVar("A", bound=Action)

LINEAR = (0.0, 0.001, 0.0, 0.0)
"""Coefficients under which a prompt of n tokens takes n milliseconds."""


def request(
    request_id: str, tokens: int = 10, *, arrival: float = 0.0, slo: float = 1.0, **fields: object
) -> Request:
    """A request whose deadline is its arrival plus its SLO, unless told otherwise."""
    values: dict[str, object] = {
        "request_id": request_id,
        "num_prompt_tokens": tokens,
        "arrival_s": arrival,
        "deadline_s": arrival + slo,
        "ttft_slo_s": slo,
        **fields,
    }
    return Request(**values)  # type: ignore[arg-type]  # checked by the dataclass at run time


def scheduler(
    *,
    blocks: int = 10_000,
    block_size: int = 16,
    coefficients: tuple[float, float, float, float] = LINEAR,
    **settings: object,
) -> Scheduler:
    """A scheduler with plain defaults: no ageing, no online correction, so that numbers can be worked by hand."""
    values: dict[str, object] = {"ageing": None, "online_correction": False, **settings}
    return Scheduler(
        SchedulerSettings(**values),  # type: ignore[arg-type]  # checked by the dataclass at run time
        KVCachePool(blocks, block_size),
        Predictor(coefficients),
    )


@dataclass
class _Running:
    task: Task
    total_s: float
    executed_s: float = 0.0
    since_s: float | None = None  # when it got the baton; None while parked
    pause_ticket: int | None = None
    unwinding: bool = False
    version: int = 0  # makes planned completions of an earlier turn void


class _Memory:
    """What is in each block: which chain of tokens, and how many of its tokens are computed.

    A task's blocks hold garbage from its submission to its completion, so that whoever reads too early is caught.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._content: dict[int, tuple[object, int]] = {}
        self.requests: dict[str, Request] = {}

    def check(self, task: Task) -> None:
        """All KV before each item's start must be in place."""
        for item in task.items:
            if task.kind == "decode":
                continue
            request = self.requests[item.request_id]
            assert len(item.block_ids) * self._block_size >= item.start + item.num_tokens
            assert item.num_tokens > 0
            assert item.completes == (item.start + item.num_tokens == request.num_prompt_tokens)
            for index in range(-(-item.start // self._block_size)):
                expected = min(item.start - index * self._block_size, self._block_size)
                content, computed = self._content.get(item.block_ids[index], (None, 0))
                assert content == self._chain(request, index), (
                    f"{request.request_id} reads what is not its own"
                )
                assert computed >= expected, f"{request.request_id} reads what nobody has computed"

    def write(self, task: Task, *, done: bool) -> None:
        for item in task.items:
            end = item.start + (item.num_tokens if done else 0)
            for index, block in enumerate(item.block_ids):
                first = index * self._block_size
                if first + self._block_size > item.start and first < item.start + item.num_tokens:
                    computed = min(max(end - first, 0), self._block_size)
                    self._content[block] = (self._chain(self.requests[item.request_id], index), computed)

    def _chain(self, request: Request, index: int) -> object:
        if index < len(request.prefix_hashes):
            return request.prefix_hashes[index]
        return (request.request_id, index)


@dataclass
class Entry:
    """One step of a run: what the scheduler was told and what it wanted."""

    now_s: float
    event: Event
    actions: tuple[Action, ...]


@dataclass
class VirtualEngine:
    """Runs a scheduler to the end of a scenario, in virtual time.

    `duration` is how long a task really takes with the baton. `ack_s` is the time to the next preemption point,
    `delivery_s` how long an event lies in the mailbox, `hold_s` how long finished KV is held (None: for ever).
    """

    scheduler: Scheduler
    duration: Callable[[Task], float] = lambda task: task.predicted_s
    fails: Callable[[Task], str | None] = lambda task: None
    ack_s: float = 0.0
    delivery_s: Callable[[], float] = lambda: 0.0
    hold_s: float | None = 0.0
    now_s: float = 0.0
    log: list[Entry] = field(default_factory=list)
    outcomes: dict[str, tuple[str, float]] = field(default_factory=dict)
    busy_s: float = 0.0
    _plan: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: int = 0
    _mail_s: float = 0.0
    _tasks: dict[int, _Running] = field(default_factory=dict)
    _baton: _Running | None = None
    _tick_s: float | None = None
    _memory: _Memory = field(init=False)

    def __post_init__(self) -> None:
        self._memory = _Memory(self.scheduler.kv.block_size)

    # -- scenario

    def at(self, time_s: float, event: Event) -> None:
        """Let `event` reach the scheduler at `time_s`."""
        self._at(time_s, lambda: self._deliver(event))

    def arrive(self, *requests: Request) -> None:
        for item in requests:
            self.at(item.arrival_s, Arrival(requests=(item,)))

    def cancel(self, time_s: float, request_id: str) -> None:
        self.at(time_s, Cancelled(request_id=request_id))

    def reconfigure(self, time_s: float, settings: SchedulerSettings) -> None:
        self.at(time_s, Reconfigured(settings=settings))

    def run(self, *, until_s: float = 1e6, steps: int = 100_000) -> None:
        """Go on until nothing is left to happen, or `until_s`."""
        for _ in range(steps):
            next_s = self._plan[0][0] if self._plan else None
            if self._tick_s is not None and (next_s is None or self._tick_s < next_s):
                if self._tick_s > until_s:
                    return
                self.now_s = max(self.now_s, self._tick_s)
                self._tick_s = None
                self._deliver(Tick())
            elif next_s is None or next_s > until_s:
                return
            else:
                self.now_s, _, act = heapq.heappop(self._plan)
                act()
        raise AssertionError(f"the scenario does not end within {steps} steps")

    # -- what tests read

    @property
    def order_started(self) -> list[str]:
        """Request ids in the order they were submitted, batches joined with '+'."""
        return [
            "+".join(item.request_id for item in action.task.items)
            for entry in self.log
            for action in entry.actions
            if isinstance(action, Submit)
        ]

    def actions(self, kind: type[A]) -> list[A]:
        return [action for entry in self.log for action in entry.actions if isinstance(action, kind)]

    # -- engine

    def _at(self, time_s: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._plan, (time_s, self._count, act))

    def _post(self, event: Event) -> None:
        self._mail_s = max(self._mail_s, self.now_s + self.delivery_s())
        self._at(self._mail_s, lambda: self._deliver(event))

    def _deliver(self, event: Event) -> None:
        if self._baton is not None and hasattr(event, "progress") and event.progress is None:
            event = type(event)(
                **{
                    name: getattr(event, name)
                    for name in event.__dataclass_fields__  # type: ignore[union-attr]
                    if name != "progress"
                },
                progress=self._progress(self._baton),
            )
        if isinstance(event, Arrival):
            self._memory.requests.update({item.request_id: item for item in event.requests})
        actions = self.scheduler.handle(event, self.now_s)
        self._tick_s = self.scheduler.next_tick_s
        assert self._tick_s is None or self._tick_s > self.now_s, "a tick must lie in the future"
        self.log.append(Entry(self.now_s, event, actions))
        for action in actions:
            self._carry_out(action)

    def _progress(self, running: _Running) -> Progress:
        executed_s = running.executed_s + (
            self.now_s - running.since_s if running.since_s is not None else 0.0
        )
        return Progress(
            task_id=running.task.task_id,
            work_done=min(executed_s / running.total_s, 1.0),
            executed_s=executed_s,
        )

    def _carry_out(self, action: Action) -> None:
        match action:
            case Submit(task=task):
                assert self._baton is None, "submitted while another task has the baton"
                assert task.task_id not in self._tasks
                running = self._tasks[task.task_id] = _Running(task, self.duration(task))
                self._memory.check(task)
                self._memory.write(task, done=False)
                self._give_baton(running)
            case Resume(task_id=task_id):
                assert self._baton is None, "resumed while another task has the baton"
                assert not self._tasks[task_id].unwinding
                self._give_baton(self._tasks[task_id])
            case Preempt(task_id=task_id, ticket=ticket):
                target = self._tasks.get(task_id)
                if target is None or target is not self._baton:
                    return  # ended or parked already
                target.pause_ticket = ticket
                version = target.version
                self._at(self.now_s + self.ack_s, lambda: self._park(target, ticket, version))
            case WithdrawPreempt(task_id=task_id, ticket=ticket):
                target = self._tasks.get(task_id)
                if target is not None and target.pause_ticket == ticket:
                    target.pause_ticket = None
            case Cancel(task_id=task_id):
                target = self._tasks.get(task_id)
                if target is not None:
                    assert not target.unwinding, "cancelled twice"
                    target.unwinding = True
                    self._at(self.now_s + self.ack_s, lambda: self._unwind(target))
            case Finish(request_id=request_id, outcome=outcome):
                assert request_id not in self.outcomes, f"{request_id} got a second outcome"
                self.outcomes[request_id] = (outcome, self.now_s)
                if outcome == "completed" and self.hold_s is not None:
                    self._at(
                        self.now_s + self.hold_s,
                        lambda: self._deliver(CapacityFreed(request_ids=(request_id,))),
                    )

    def _give_baton(self, running: _Running) -> None:
        self._baton = running
        running.since_s = self.now_s
        running.pause_ticket = None
        running.version += 1
        version = running.version
        end_s = self.now_s + running.total_s - running.executed_s
        self._at(end_s, lambda: self._complete(running, version))

    def _take_baton(self, running: _Running) -> None:
        assert running.since_s is not None
        running.executed_s += self.now_s - running.since_s
        self.busy_s += self.now_s - running.since_s
        running.since_s = None
        running.version += 1
        self._baton = None

    def _complete(self, running: _Running, version: int) -> None:
        if running.version != version or self._baton is not running:
            return
        self._take_baton(running)
        del self._tasks[running.task.task_id]
        error = self.fails(running.task)
        if error is not None:
            self._post(Failed(task_id=running.task.task_id, error=error, executed_s=running.executed_s))
            return
        self._memory.write(running.task, done=True)
        self._post(Completed(task_id=running.task.task_id, executed_s=running.executed_s))

    def _park(self, running: _Running, ticket: int, version: int) -> None:
        if self._baton is not running or running.version != version or running.pause_ticket != ticket:
            return
        self._take_baton(running)
        running.pause_ticket = None
        self._post(Parked(task_id=running.task.task_id, ticket=ticket, progress=self._progress(running)))

    def _unwind(self, running: _Running) -> None:
        if running.task.task_id not in self._tasks:
            return  # it completed first
        if self._baton is running:
            self._take_baton(running)
        del self._tasks[running.task.task_id]
        self._post(Failed(task_id=running.task.task_id, error=None, executed_s=running.executed_s))
