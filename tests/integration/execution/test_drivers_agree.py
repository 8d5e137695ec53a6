"""The scheduler's two drivers tell one story: real threads on a virtual clock, and the simulator.

1,000 random scenarios: bursts, batches, chunks, preemptions of every granularity, withdrawn and overtaken pause requests,
cancellations at any moment, engine failures, scarce KV, ticks, new settings, much of it at one and the same
instant. `test_the_scenarios_cover_what_they_are_for` counts that these situations do occur.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from flowprefill.scheduling.actions import Cancel, Finish, Preempt, Resume, Submit, WithdrawPreempt
from flowprefill.scheduling.events import Arrival, Cancelled, Completed, Failed, Parked, Tick
from support.scenarios import Run, Scenario, make_scenario, run_simulator, run_threads

NUM_SCENARIOS = 1_000
CHUNK = 50


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("flowprefill")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # injected failures are meant
    yield
    logger.setLevel(level)


@pytest.mark.parametrize("first", range(0, NUM_SCENARIOS, CHUNK))
def test_threads_and_simulator_make_the_same_decisions_at_the_same_times(first: int) -> None:
    for seed in range(first, first + CHUNK):
        scenario = make_scenario(seed)
        threads, simulated = run_threads(scenario), run_simulator(scenario)
        for number, (theirs, ours) in enumerate(zip(threads.decisions, simulated.decisions, strict=False)):
            assert theirs == ours, f"seed {seed}: decision {number} differs"
        assert len(threads.decisions) == len(simulated.decisions), f"seed {seed}"
        assert threads.finished == simulated.finished, f"seed {seed}"
        _every_request_ends_once(scenario, threads)
        _every_answer_is_right(threads, seed)


def _every_request_ends_once(scenario: Scenario, run: Run) -> None:
    assert sorted(request_id for request_id, _ in run.finished) == sorted(scenario.prompts)


def _every_answer_is_right(run: Run, seed: int) -> None:
    """Preempted, batched, chunked, from cached prefixes or not: the token is that of an undisturbed model."""
    assert run.tokens == run.expected_tokens, f"seed {seed}"
    errors = {e.error for e, _, _ in run.decisions if isinstance(e, Failed) and e.error is not None}
    assert all(error.endswith("injected") for error in errors), f"seed {seed}: {errors}"


def test_the_scenarios_cover_what_they_are_for() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_SCENARIOS):
        seen += _situations(run_simulator(make_scenario(seed)))
    wanted = {
        "several requests in one batch": 500,
        "chunk of a prompt": 500,
        "start from a cached prefix": 500,
        "parked": 300,
        "parked while another is": 30,
        "resumed": 300,
        "completed before it could park": 10,
        "withdrawn": 30,
        "cancelled while asked to pause": 10,
        "failed while parked": 3,
        "unwound while parked": 30,
        "started over for lack of KV": 20,
        "engine failure": 100,
        "tick": 100,
        "decisions at one instant": 1000,
    }
    assert {name: seen[name] for name, least in wanted.items() if seen[name] < least} == {}


def _situations(run: Run) -> Counter[str]:
    seen: Counter[str] = Counter()
    parked: set[int] = set()
    pausing: dict[int, int] = {}
    starts: Counter[str] = Counter()
    before_s = -1.0
    for event, actions, now_s in run.decisions:
        seen["decisions at one instant"] += now_s == before_s
        before_s = now_s
        seen["tick"] += isinstance(event, Tick)
        match event:
            case Parked(task_id=task_id):
                seen["parked"] += 1
                seen["parked while another is"] += bool(parked)
                parked.add(task_id)
                pausing.pop(task_id, None)
            case Completed(task_id=task_id):
                seen["completed before it could park"] += pausing.pop(task_id, None) is not None
            case Failed(task_id=task_id, error=error):
                seen["engine failure"] += error is not None
                seen["failed while parked"] += error is not None and task_id in parked
                seen["unwound while parked"] += error is None and task_id in parked
                parked.discard(task_id)
                pausing.pop(task_id, None)
            case Cancelled():
                seen["cancelled while asked to pause"] += bool(pausing) and any(
                    isinstance(action, Cancel) and action.task_id in pausing for action in actions
                )
            case Arrival():
                pass
        for action in actions:
            match action:
                case Submit(task=task):
                    seen["several requests in one batch"] += len(task.items) > 1
                    for item in task.items:
                        seen["chunk of a prompt"] += not item.completes
                        first = starts[item.request_id] == 0
                        seen["start from a cached prefix"] += first and item.start > 0
                        seen["started over for lack of KV"] += not first and item.start == 0
                        starts[item.request_id] += 1
                case Preempt(task_id=task_id, ticket=ticket):
                    pausing[task_id] = ticket
                case WithdrawPreempt(task_id=task_id):
                    seen["withdrawn"] += 1
                    pausing.pop(task_id, None)
                case Resume(task_id=task_id):
                    seen["resumed"] += 1
                    parked.discard(task_id)
                case Finish():
                    pass
    return seen


def test_without_the_prefix_rule_prompts_build_on_kv_that_is_not_there() -> None:
    """Blocks enter the prefix cache when their task completes; entering them at allocation goes wrong."""
    errors: Counter[str] = Counter()
    for seed in range(150):
        scenario = make_scenario(seed)
        run = run_threads(scenario, scheduler=scenario.scheduler(commit_on_allocate=True))
        for event, _, _ in run.decisions:
            if isinstance(event, Failed) and event.error is not None and "WrongKV" in event.error:
                errors["wrong KV"] += 1
    assert errors["wrong KV"] > 0
