"""The rules of a turn."""

from __future__ import annotations

from flowprefill.execution.turns import TICK_GAP_S, TickTimer, coalesce, with_progress
from flowprefill.request import Request
from flowprefill.scheduling.events import Arrival, Cancelled, Completed, Progress, Tick


def arrival(*request_ids: str) -> Arrival:
    requests = [
        Request(request_id=i, num_prompt_tokens=1, arrival_s=0.0, deadline_s=1.0, ttft_slo_s=1.0)
        for i in request_ids
    ]
    return Arrival(requests=tuple(requests))


def test_only_adjacent_arrivals_become_one_and_nothing_changes_its_place() -> None:
    events = [
        arrival("a"),
        arrival("b", "c"),
        Cancelled(request_id="a"),
        arrival("d"),
        Completed(task_id=1, executed_s=1.0),
        arrival("e"),
        arrival("f"),
    ]
    assert list(coalesce(events)) == [
        arrival("a", "b", "c"),
        Cancelled(request_id="a"),
        arrival("d"),
        Completed(task_id=1, executed_s=1.0),
        arrival("e", "f"),
    ]
    assert list(coalesce([])) == []


def test_progress_goes_with_events_that_do_not_speak_of_a_task_themselves() -> None:
    progress = Progress(task_id=1, work_done=0.5, executed_s=1.0)
    assert with_progress(Tick(), progress) == Tick(progress=progress)
    assert with_progress(Tick(), None) == Tick()
    completed = Completed(task_id=2, executed_s=1.0)
    assert with_progress(completed, progress) is completed


def test_a_tick_that_changes_nothing_comes_again_only_after_a_gap() -> None:
    timer = TickTimer()
    assert timer.due_s(None) is None
    assert timer.due_s(3.0) == 3.0
    timer.ticked(3.0)
    assert timer.due_s(3.0) == 3.0 + TICK_GAP_S
    assert timer.due_s(9.0) == 9.0
