"""Random scenarios for the scheduler's two drivers, and how to run each of them on one.

A scenario is a function of its seed. `run_threads` plays it with the real threads on a virtual clock over the simulated
engine, `run_simulator` in one thread; both return the log of decisions.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from flowprefill.engines.protocol import (
    DecodeSequence,
    EngineSpec,
    Gate,
    Plan,
    PrefillItem,
    TaskUnwound,
)
from flowprefill.engines.simulated.cost import CostModel, Operator
from flowprefill.engines.simulated.engine import SimulatedEngine
from flowprefill.engines.simulated.timetable import Timetable
from flowprefill.execution.driver import SchedulerDriver
from flowprefill.execution.listener import SilentListener
from flowprefill.execution.pool import ExecutionPool
from flowprefill.execution.results import Finished, FinishedPrefill
from flowprefill.execution.simulated_task import Fault
from flowprefill.execution.simulator import Input, Simulator
from flowprefill.execution.virtual_clock import VirtualClock
from flowprefill.request import Request
from flowprefill.scheduling.actions import Action, Finish, Granularity, Outcome, Task
from flowprefill.scheduling.events import Arrival, Cancelled, CapacityFreed, Event, Reconfigured
from flowprefill.scheduling.kv import KVCachePool, prefix_hashes
from flowprefill.scheduling.predictor import Predictor
from flowprefill.scheduling.scheduler import Scheduler
from flowprefill.scheduling.settings import Ageing, PolicyName, Preemption, SchedulerSettings

Decision = tuple[Event, tuple[Action, ...], float]

POLICIES: tuple[PolicyName, ...] = ("fcfs", "edf", "d-edf", "s-edf", "srpt", "moore-hodgson")
PREEMPTIONS: tuple[Preemption, ...] = ("operator", "operator", "operator", "layer", "chunk", "none")
BLOCK_SIZE = 4
VOCAB_SIZE = 1000

_OPERATORS = (
    Operator(name="qkv", share=0.25),
    Operator(name="attention", attention=True),
    Operator(name="o", share=0.25, collective=True),
    Operator(name="experts", share=0.5, collective=True),
)
# Times that are exact in binary, on one grid: points, ends and inputs often fall on the same instant.
DYADIC = CostModel(
    name="dyadic",
    num_layers=2,
    operators=_OPERATORS,
    fixed_s=9 / 1024,
    linear_s=1000 / 1024,
    quadratic_s=0.0,
)
UNEVEN = CostModel(
    name="uneven",
    num_layers=3,
    operators=_OPERATORS,
    fixed_s=0.0037,
    linear_s=0.61,
    quadratic_s=0.31,
)
GRID_S = 1 / 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What happens, and to which scheduler. `release_after_s` is the delay from completion to release, by id."""

    seed: int
    cost: CostModel
    max_gap_s: float | None
    settings: SchedulerSettings
    num_blocks: int
    inputs: tuple[tuple[float, Input], ...]
    prompts: dict[str, tuple[int, ...]]
    release_after_s: dict[str, float]
    fault_rate: float

    def scheduler(self, *, commit_on_allocate: bool = False) -> Scheduler:
        kv = KVCachePool(self.num_blocks, BLOCK_SIZE, commit_on_allocate=commit_on_allocate)
        return Scheduler(self.settings, kv, Predictor(self.cost.coefficients))

    def fault(self, task: Task) -> Fault | None:
        """Whether and how this task fails: a function of seed and task id alone."""
        chance = random.Random(f"{self.seed}/{task.task_id}")
        if chance.random() >= self.fault_rate:
            return None
        error = f"the engine failed in a batch of {len(task.items)}: RuntimeError: injected"
        if chance.random() < 0.75:
            return Fault(error=error, on_unwind=True)
        return Fault(error=error, at_point=chance.randrange(self.cost.num_layers * 4))

    def timetable(self, task: Task) -> Timetable:
        shapes = [(item.num_tokens, item.start) for item in task.items]
        return self.cost.prefill(shapes, task.granularity, self.max_gap_s)


def make_scenario(seed: int) -> Scenario:
    """The scenario of this seed."""
    chance = random.Random(seed)
    dyadic = chance.random() < 0.6
    cost = DYADIC if dyadic else UNEVEN
    num_blocks = chance.choice([20, 24, 40, 400])
    most_tokens = min(64, num_blocks * BLOCK_SIZE)
    settings = _settings(chance)
    prompts: dict[str, tuple[int, ...]] = {}
    inputs: list[tuple[float, Input]] = []
    release_after_s = {}
    when_s = 0.0
    roots = [tuple(chance.randrange(VOCAB_SIZE) for _ in range(most_tokens)) for _ in range(3)]
    for burst in range(chance.randint(3, 14)):
        steps = chance.choice([0, 1, 4, 16, 16, 40])
        when_s += steps * GRID_S if dyadic else chance.random() * steps * GRID_S
        requests = []
        for number in range(chance.choice([1, 1, 1, 2, 3])):
            request_id = f"r{burst}.{number}"
            urgent = chance.random() < 0.4
            length = chance.choice([1, 3, 7, 8]) if urgent else chance.choice([16, 17, 32, 48, most_tokens])
            root = chance.choice(roots)
            own = chance.randint(0, length)
            tokens = root[: length - own] + tuple(chance.randrange(VOCAB_SIZE) for _ in range(own))
            prompts[request_id] = tokens
            release_after_s[request_id] = chance.choice([0, 1, 2, 20]) * GRID_S
            slo_s = (chance.choice([16, 32, 64]) if urgent else chance.choice([64, 256, 1024])) * GRID_S
            requests.append(
                Request(
                    request_id=request_id,
                    num_prompt_tokens=length,
                    arrival_s=when_s,
                    deadline_s=when_s + slo_s,
                    ttft_slo_s=slo_s,
                    weight=chance.choice([1.0, 1.0, 3.0]),
                    shed_when_infeasible=chance.random() < 0.1,
                    prefix_hashes=prefix_hashes(tokens, BLOCK_SIZE),
                )
            )
            if chance.random() < 0.3:
                leaves_s = when_s + chance.choice([0, 0, 1, 2, 8, 30]) * GRID_S
                inputs.append((leaves_s, Cancelled(request_id=request_id)))
        inputs.append((when_s, Arrival(requests=tuple(requests))))
        if burst and chance.random() < 0.4:  # whoever may just be asked to pause
            leaver = chance.choice(sorted(prompts))
            inputs.append((when_s + chance.choice([0, 0.25, 0.5]) * GRID_S, Cancelled(request_id=leaver)))
        if chance.random() < 0.05:
            inputs.append((when_s, Reconfigured(settings=_settings(chance))))
    inputs.sort(key=lambda item: item[0])
    return Scenario(
        seed=seed,
        cost=cost,
        max_gap_s=chance.choice([None, 2 * GRID_S, 0.005]),
        settings=settings,
        num_blocks=num_blocks,
        inputs=tuple(inputs),
        prompts=prompts,
        release_after_s=release_after_s,
        fault_rate=chance.choice([0.0, 0.0, 0.4]),
    )


def _settings(chance: random.Random) -> SchedulerSettings:
    preemption = chance.choice(PREEMPTIONS)
    chunk_tokens = chance.choice([8, 20]) if preemption == "chunk" or chance.random() < 0.3 else None
    return SchedulerSettings(
        policy=chance.choice(POLICIES),
        preemption=preemption,
        batch_token_budget=chance.choice([1, 16, 64]),
        chunk_tokens=chunk_tokens,
        max_suspended=chance.choice([0, 1, 2, 8]),
        recompute_suspended=chance.random() < 0.7,
        ageing=chance.choice([None, Ageing(factor=1.5, share=0.2), Ageing()]),
        queue_limit=chance.choice([4, 4096]),
        online_correction=chance.random() < 0.7,
    )


@dataclass(slots=True, kw_only=True)
class Run:
    """What a driver did. For threads, `tokens` are the first tokens of completed requests and `expected_tokens` what an
    undisturbed model says."""

    decisions: list[Decision] = field(default_factory=list)
    finished: list[tuple[str, Outcome]] = field(default_factory=list)
    tokens: dict[str, int | None] = field(default_factory=dict)
    expected_tokens: dict[str, int] = field(default_factory=dict)

    def record(self, event: Event, actions: Sequence[Action], now_s: float) -> None:
        self.decisions.append((event, tuple(actions), now_s))


def run_simulator(scenario: Scenario) -> Run:
    """Play the scenario in one thread."""
    run = Run()

    def on_finish(finish: Finish, now_s: float) -> None:
        run.finished.append((finish.request_id, finish.outcome))
        if finish.outcome == "completed":
            delay_s = scenario.release_after_s[finish.request_id]
            simulator.at(now_s + delay_s, CapacityFreed(request_ids=(finish.request_id,)))

    simulator = Simulator(
        scenario.scheduler(),
        scenario.timetable,
        on_finish=on_finish,
        record=run.record,
        fault=scenario.fault,
    )
    for when_s, event in scenario.inputs:
        simulator.at(when_s, event)
    simulator.run()
    return run


class Feeder(SilentListener):
    """Puts a scenario's inputs into a driver at their times, and releases what completed after its delay."""

    def __init__(self, scenario: Scenario, clock: VirtualClock, run: Run) -> None:
        self._scenario = scenario
        self._clock = clock
        self._run = run
        self._wake = clock.signal()
        self._ids = itertools.count()
        self._heap = [(when_s, next(self._ids), event) for when_s, event in scenario.inputs]
        heapq.heapify(self._heap)
        self._stopping = False
        self.crash: BaseException | None = None

    def on_finish(self, request_id: str, outcome: Outcome, reason: str, result: Finished | None) -> None:
        self._run.finished.append((request_id, outcome))
        if outcome == "completed":
            assert isinstance(result, FinishedPrefill)
            self._run.tokens[request_id] = result.token_id
            when_s = self._clock.now_s() + self._scenario.release_after_s[request_id]
            freed = CapacityFreed(request_ids=(request_id,))
            heapq.heappush(self._heap, (when_s, next(self._ids), freed))
            self._wake.set()

    def on_crash(self, error: BaseException) -> None:
        self.crash = error

    def feed(self, driver: SchedulerDriver) -> None:
        """Put in what is due, all of one instant at once, after everything else that this instant brings."""
        while not self._stopping:
            if self._wake.wait(self._heap[0][0] if self._heap else None):
                continue  # there is something new in the heap
            while self._heap and self._heap[0][0] <= self._clock.now_s():
                match heapq.heappop(self._heap)[2]:
                    case Arrival(requests=requests):
                        driver.submit(requests)
                    case Cancelled(request_id=request_id):
                        driver.cancel(request_id)
                    case CapacityFreed(request_ids=request_ids):
                        driver.release(request_ids)
                    case Reconfigured(settings=settings):
                        driver.reconfigure(settings)

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()


def run_threads(scenario: Scenario, *, scheduler: Scheduler | None = None) -> Run:
    """Play the scenario with the driver's and the pool's threads on a virtual clock."""
    run = Run()
    clock = VirtualClock()
    simulated = SimulatedEngine(
        scenario.cost,
        clock,
        num_kv_blocks=scenario.num_blocks,
        block_size=BLOCK_SIZE,
        max_gap_s=scenario.max_gap_s,
        vocab_size=VOCAB_SIZE,
    )
    engine = FaultyEngine(simulated)

    def payload(task: Task) -> list[PrefillItem]:
        engine.arm(scenario.fault(task))
        return [
            PrefillItem(
                request_id=item.request_id,
                token_ids=scenario.prompts[item.request_id][item.start : item.start + item.num_tokens],
                start=item.start,
                block_ids=item.block_ids,
                sample=item.completes,
            )
            for item in task.items
        ]

    feeder = Feeder(scenario, clock, run)
    pool = ExecutionPool(engine, clock)
    driver = SchedulerDriver(
        scheduler or scenario.scheduler(), pool, clock, payload, feeder, record=run.record
    )
    driver.start()
    thread = clock.start_thread(lambda: feeder.feed(driver), name="feeder", rank=1)
    try:
        assert clock.wait_at_rest(60), "the threads never came to rest"
    finally:
        feeder.stop()
        thread.join(60)
        driver.close()
    if feeder.crash is not None:
        raise feeder.crash
    assert pool.num_threads == 0
    run.expected_tokens = {i: simulated.next_token_id(scenario.prompts[i]) for i in run.tokens}
    return run


class _FaultyGate:
    """A gate whose task raises on reaching one point."""

    def __init__(self, gate: Gate, at_point: int) -> None:
        self._gate = gate
        self._at_point = at_point

    @property
    def raised(self) -> bool:
        return self._gate.raised

    @property
    def index(self) -> int:
        return self._gate.index

    @index.setter
    def index(self, index: int) -> None:
        if index == self._at_point:
            raise RuntimeError("injected")
        self._gate.index = index

    def pause(self, index: int) -> None:
        self._gate.pause(index)


class FaultyEngine:
    """An engine whose next planned batch fails as told."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._next: Fault | None = None
        self._faults: dict[int, Fault] = {}

    def arm(self, fault: Fault | None) -> None:
        """The batch that is planned next has this fault."""
        self._next = fault

    @property
    def spec(self) -> EngineSpec:
        return self._engine.spec

    def thread_context(self) -> AbstractContextManager[object]:
        return self._engine.thread_context()

    def plan_prefill(self, items: Sequence[PrefillItem], granularity: Granularity) -> Plan:
        plan = self._engine.plan_prefill(items, granularity)
        if self._next is not None:
            self._faults[id(plan)] = self._next
            self._next = None
        return plan

    def plan_decode(self, sequences: Sequence[DecodeSequence]) -> Plan:
        return self._engine.plan_decode(sequences)

    def run(self, plan: Plan, gate: Gate) -> Sequence[int | None]:
        fault = self._faults.pop(id(plan), None)
        if fault is None:
            return self._engine.run(plan, gate)
        if fault.at_point is not None:
            return self._engine.run(plan, _FaultyGate(gate, fault.at_point))
        try:
            return self._engine.run(plan, gate)
        except TaskUnwound as unwound:
            raise RuntimeError("injected") from unwound

    def read_blocks(self, block_ids: Sequence[int]) -> memoryview:
        return self._engine.read_blocks(block_ids)

    def write_blocks(self, block_ids: Sequence[int], data: memoryview) -> None:
        self._engine.write_blocks(block_ids, data)

    def close(self) -> None:
        self._engine.close()
