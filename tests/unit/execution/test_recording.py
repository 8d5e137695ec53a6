"""Recordings keep every event and action exactly, and replays notice the first difference."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowprefill.execution.recording import Header, Recorder, read, replay
from flowprefill.execution.simulator import Simulator
from flowprefill.request import Request
from flowprefill.scheduling import actions as act
from flowprefill.scheduling import events as ev
from flowprefill.scheduling.kv import KVCachePool
from flowprefill.scheduling.predictor import Predictor
from flowprefill.scheduling.scheduler import Scheduler
from flowprefill.scheduling.settings import SchedulerSettings
from support.scenarios import make_scenario


def scheduler() -> Scheduler:
    return Scheduler(SchedulerSettings(), KVCachePool(10, 4), Predictor((0.1, 0.2, 0.0, 0.0)))


def record_of(*decisions: tuple[ev.Event, tuple[act.Action, ...], float]) -> list[str]:
    out = io.StringIO()
    recorder = Recorder(out, Header.of(scheduler()))
    for event, actions, now_s in decisions:
        recorder(event, actions, now_s)
    return out.getvalue().splitlines()


times = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(max_size=8)
requests = st.builds(
    Request,
    request_id=texts,
    num_prompt_tokens=st.integers(1, 10**6),
    arrival_s=times,
    deadline_s=times,
    ttft_slo_s=st.floats(min_value=1e-9, max_value=1e9),
    weight=st.floats(min_value=1e-9, max_value=1e9),
    prefix_hashes=st.lists(st.integers(0, 2**64 - 1), max_size=3).map(tuple),
    kind=st.sampled_from(["prefill", "decode"]),
)
progress = st.none() | st.builds(ev.Progress, task_id=st.integers(), work_done=times, executed_s=times)
events = st.one_of(
    st.builds(ev.Arrival, requests=st.lists(requests, max_size=2).map(tuple), progress=progress),
    st.builds(ev.Parked, progress=progress),
    st.builds(ev.Completed, executed_s=times),
    st.builds(ev.Failed, error=st.none() | texts, executed_s=times),
    st.builds(ev.Cancelled, request_id=texts, progress=progress),
    st.builds(ev.CapacityFreed, request_ids=st.lists(texts, max_size=3).map(tuple), progress=progress),
    st.builds(ev.Tick, progress=progress),
)
actions = st.one_of(
    st.builds(act.Preempt),
    st.builds(act.WithdrawPreempt),
    st.builds(act.Resume),
    st.builds(act.Cancel),
    st.builds(act.Finish, request_id=texts, reason=texts),
)


@settings(deadline=None)
@given(events, st.lists(actions, max_size=3).map(tuple), times)
def test_what_is_read_is_what_was_written(
    event: ev.Event, answer: tuple[act.Action, ...], now_s: float
) -> None:
    _, decisions = read(record_of((event, answer, now_s)))
    [decision] = decisions
    assert (decision.event, decision.actions, decision.now_s) == (event, answer, now_s)


def test_tasks_settings_and_the_header_come_back_too() -> None:
    item = act.TaskItem(request_id="a", start=4, num_tokens=3, block_ids=(7, 2), completes=True)
    submit = act.Submit(task=act.Task(task_id=1, items=(item,), predicted_s=0.1 + 0.2, granularity="layer"))
    changed = ev.Reconfigured(settings=SchedulerSettings(policy="srpt", ageing=None, chunk_tokens=512))
    header, decisions = read(record_of((changed, (submit,), 1e-300)))
    [decision] = decisions
    assert (decision.event, decision.actions, decision.now_s) == (changed, (submit,), 1e-300)
    assert header == Header.of(scheduler())
    assert Header.of(header.build()) == header


def test_a_simulated_run_replays_and_a_changed_action_is_found() -> None:
    scenario = make_scenario(3)
    out = io.StringIO()
    recorded = scenario.scheduler()
    simulator = Simulator(recorded, scenario.timetable, record=Recorder(out, Header.of(recorded)))
    for when_s, event in scenario.inputs:
        simulator.at(when_s, event)
    simulator.run()
    lines = out.getvalue().splitlines()
    assert len(lines) > 10
    assert replay(lines) is None
    number, line = next((n, line) for n, line in enumerate(lines) if '"Submit"' in line)
    changed = json.loads(line)
    changed["actions"][-1]["task"]["predicted_s"] += 1.0
    difference = replay([*lines[:number], json.dumps(changed), *lines[number + 1 :]])
    assert difference is not None
    assert difference.index == number - 1
    assert difference.recorded.actions != difference.replayed


def test_a_recording_that_is_empty_or_names_what_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        read([])
    lines = record_of((ev.Tick(), (), 0.0))
    with pytest.raises(ValueError, match="'Tock'; accepted are Arrival, Cancel,"):
        replay([lines[0], lines[1].replace("Tick", "Tock")])
