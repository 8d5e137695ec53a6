"""Driver and pool on the machine's own clock: threads race as they like, and the invariants hold.

Nothing here depends on how fast the machine is: outcomes are waited for, and the recording of what happened must replay
to the same actions.
"""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager

import pytest

from flowprefill.clock import MonotonicClock
from flowprefill.engines.protocol import DecodeSequence, EngineSpec, Gate, Plan, PrefillItem
from flowprefill.engines.simulated.engine import SimulatedEngine
from flowprefill.engines.simulated.presets import TINY
from flowprefill.execution import recording
from flowprefill.execution.driver import SchedulerDriver
from flowprefill.execution.listener import SilentListener
from flowprefill.execution.pool import ExecutionPool
from flowprefill.execution.results import Finished, FinishedPrefill
from flowprefill.request import Request
from flowprefill.scheduling.actions import Action, Granularity, Outcome, Preempt, Task
from flowprefill.scheduling.events import Event, Parked
from flowprefill.scheduling.kv import KVCachePool, prefix_hashes
from flowprefill.scheduling.predictor import Predictor
from flowprefill.scheduling.scheduler import Scheduler
from flowprefill.scheduling.settings import PolicyName, SchedulerSettings

BLOCK_SIZE = 16
NUM_BLOCKS = 120
NUM_REQUESTS = 120
VOCAB_SIZE = 500


class OneAtATime:
    """Wraps an engine and notices when two tasks advance in it at once."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._advancing = threading.Lock()
        self.collisions = 0

    @property
    def spec(self) -> EngineSpec:
        return self._engine.spec

    def thread_context(self) -> AbstractContextManager[object]:
        return self._engine.thread_context()

    def plan_prefill(self, items: Sequence[PrefillItem], granularity: Granularity) -> Plan:
        return self._engine.plan_prefill(items, granularity)

    def plan_decode(self, sequences: Sequence[DecodeSequence]) -> Plan:
        return self._engine.plan_decode(sequences)

    def run(self, plan: Plan, gate: Gate) -> Sequence[int | None]:
        watched = _WatchedGate(self, gate)
        self.enter()
        try:
            return self._engine.run(plan, watched)
        finally:
            if watched.advances:
                self.leave()

    def enter(self) -> None:
        if not self._advancing.acquire(blocking=False):
            self.collisions += 1

    def leave(self) -> None:
        if self._advancing.locked():
            self._advancing.release()

    def read_blocks(self, block_ids: Sequence[int]) -> memoryview:
        return self._engine.read_blocks(block_ids)

    def write_blocks(self, block_ids: Sequence[int], data: memoryview) -> None:
        self._engine.write_blocks(block_ids, data)

    def close(self) -> None:
        self._engine.close()


class _WatchedGate:
    def __init__(self, engine: OneAtATime, gate: Gate) -> None:
        self._engine = engine
        self._gate = gate
        self.advances = True

    @property
    def raised(self) -> bool:
        return self._gate.raised

    @property
    def index(self) -> int:
        return self._gate.index

    @index.setter
    def index(self, index: int) -> None:
        self._gate.index = index

    def pause(self, index: int) -> None:
        self._engine.leave()
        self.advances = False  # it stays so when the task unwinds from here: then it has no baton
        self._gate.pause(index)
        self._engine.enter()
        self.advances = True


class Outcomes(SilentListener):
    """Collects outcomes, releases completed requests, and says when all are there."""

    def __init__(self, num_requests: int) -> None:
        self._missing = threading.Semaphore(0)
        self._num_requests = num_requests
        self.outcomes: list[tuple[str, Outcome]] = []
        self.tokens: dict[str, int | None] = {}
        self.crash: BaseException | None = None
        self.num_preempts = 0
        self.num_parked = 0
        self.driver: SchedulerDriver | None = None

    def on_finish(self, request_id: str, outcome: Outcome, reason: str, result: Finished | None) -> None:
        self.outcomes.append((request_id, outcome))
        if outcome == "completed":
            assert isinstance(result, FinishedPrefill)
            assert self.driver is not None
            self.tokens[request_id] = result.token_id
            self.driver.release([request_id])
        self._missing.release()

    def on_events(self, event: Event, actions: Sequence[Action], now_s: float) -> None:
        self.num_preempts += sum(isinstance(action, Preempt) for action in actions)
        self.num_parked += isinstance(event, Parked)

    def on_crash(self, error: BaseException) -> None:
        self.crash = error
        self._missing.release(self._num_requests)

    def wait_for_all(self, timeout_s: float) -> bool:
        return all(self._missing.acquire(timeout=timeout_s) for _ in range(self._num_requests))


@pytest.mark.parametrize("policy", ["s-edf", "srpt"])
def test_racing_threads_lose_nothing_and_their_recording_replays_to_the_same_actions(
    policy: PolicyName,
) -> None:
    chance = random.Random(7)
    clock = MonotonicClock()
    simulated = SimulatedEngine(
        TINY.scaled(0.5),
        clock,
        num_kv_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_gap_s=0.001,
        vocab_size=VOCAB_SIZE,
    )
    engine = OneAtATime(simulated)
    scheduler = Scheduler(
        SchedulerSettings(policy=policy, batch_token_budget=64, max_suspended=3),
        KVCachePool(NUM_BLOCKS, BLOCK_SIZE),
        Predictor(TINY.scaled(0.5).coefficients),
    )
    roots = [[chance.randrange(VOCAB_SIZE) for _ in range(800)] for _ in range(4)]
    prompts: dict[str, list[int]] = {}
    for number in range(NUM_REQUESTS):
        length = chance.choice([5, 20, 60]) if number % 3 else chance.choice([300, 500, 800])
        own = chance.randint(1, length)
        tail = [chance.randrange(VOCAB_SIZE) for _ in range(own)]
        prompts[f"r{number}"] = chance.choice(roots)[: length - own] + tail

    def payload(task: Task) -> list[PrefillItem]:
        return [
            PrefillItem(
                request_id=item.request_id,
                token_ids=prompts[item.request_id][item.start : item.start + item.num_tokens],
                start=item.start,
                block_ids=item.block_ids,
                sample=item.completes,
            )
            for item in task.items
        ]

    listener = Outcomes(NUM_REQUESTS)
    pool = ExecutionPool(engine, clock)
    record = io.StringIO()
    driver = SchedulerDriver(
        scheduler,
        pool,
        clock,
        payload,
        listener,
        record=recording.Recorder(record, recording.Header.of(scheduler)),
    )
    listener.driver = driver
    driver.start()

    def load(numbers: Sequence[int], seed: int) -> None:
        pace = random.Random(seed)
        for number in numbers:
            request_id = f"r{number}"
            prompt = prompts[request_id]
            now_s = clock.now_s()
            slo_s = 0.03 if len(prompt) < 100 else 2.0
            request = Request(
                request_id=request_id,
                num_prompt_tokens=len(prompt),
                arrival_s=now_s,
                deadline_s=now_s + slo_s,
                ttft_slo_s=slo_s,
                prefix_hashes=prefix_hashes(prompt, BLOCK_SIZE),
            )
            driver.submit([request])
            if pace.random() < 0.2:
                driver.cancel(f"r{pace.choice(list(numbers))}")
            clock.sleep_until_s(clock.now_s() + pace.choice([0.0, 0.001, 0.02]))

    loaders = [
        threading.Thread(target=load, args=(range(first, NUM_REQUESTS, 3), first)) for first in range(3)
    ]
    try:
        for loader in loaders:
            loader.start()
        assert listener.wait_for_all(60)
        for loader in loaders:
            loader.join()
    finally:
        driver.close()
    assert listener.crash is None
    assert sorted(request_id for request_id, _ in listener.outcomes) == sorted(prompts)
    assert {outcome for _, outcome in listener.outcomes} <= {"completed", "cancelled"}
    assert listener.tokens == {i: simulated.next_token_id(prompts[i]) for i in listener.tokens}
    assert engine.collisions == 0
    assert listener.num_preempts > 0
    assert listener.num_parked > 0
    assert pool.num_threads == 0
    assert recording.replay(record.getvalue().splitlines()) is None
