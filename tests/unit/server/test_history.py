from __future__ import annotations

from flowprefill.scheduling.actions import Preempt, Resume, Submit, Task, TaskItem, WithdrawPreempt
from flowprefill.scheduling.events import Completed, Failed, Parked, Tick
from flowprefill.server.history import KEPT_TASKS, History


def task(task_id: int) -> Task:
    item = TaskItem(request_id=f"r{task_id}", start=16, num_tokens=48, block_ids=(0, 1, 2, 3), completes=True)
    return Task(task_id=task_id, items=(item,), predicted_s=0.5)


def test_a_preempted_task_tells_its_blocking_prediction_and_outcome() -> None:
    history = History()
    history.record(Tick(), [Submit(task=task(1))], 0.0)
    history.record(Tick(), [Preempt(task_id=1, ticket=7)], 2.0)
    history.record(Parked(task_id=1, ticket=7), [Submit(task=task(2))], 2.25)
    history.record(Completed(task_id=2, executed_s=0.4), [Resume(task_id=1)], 3.0)
    history.record(Completed(task_id=1, executed_s=0.6), [], 4.0)
    body = history.as_json()
    assert body["preemptions"] == [{"task_id": 1, "blocking_s": 0.25}]
    assert body["tasks"] == [
        {"task_id": 2, "items": (("r2", 48, 16),), "predicted_s": 0.5, "executed_s": 0.4, "preemptions": 0},
        {"task_id": 1, "items": (("r1", 48, 16),), "predicted_s": 0.5, "executed_s": 0.6, "preemptions": 1},
    ]


def test_a_task_that_ends_before_it_can_park_blocked_until_its_end() -> None:
    history = History()
    history.record(Tick(), [Submit(task=task(1))], 0.0)
    history.record(Tick(), [Preempt(task_id=1, ticket=1)], 1.0)
    history.record(Completed(task_id=1, executed_s=1.1), [], 1.125)
    assert history.as_json()["preemptions"] == [{"task_id": 1, "blocking_s": 0.125}]


def test_a_withdrawn_pause_and_a_failed_task_leave_nothing_behind() -> None:
    history = History()
    history.record(Tick(), [Submit(task=task(1))], 0.0)
    history.record(Tick(), [Preempt(task_id=1, ticket=1)], 1.0)
    history.record(Tick(), [WithdrawPreempt(task_id=1, ticket=1)], 1.1)
    history.record(Completed(task_id=1, executed_s=9.0), [Submit(task=task(2))], 9.0)
    history.record(Failed(task_id=2, error="boom"), [], 9.5)
    body = history.as_json()
    assert body["preemptions"] == []
    assert [entry["task_id"] for entry in body["tasks"]] == [1]  # type: ignore[union-attr, attr-defined]


def test_the_past_is_bounded() -> None:
    history = History()
    for number in range(KEPT_TASKS + 10):
        history.record(Tick(), [Submit(task=task(number))], 0.0)
        history.record(Completed(task_id=number, executed_s=0.1), [], 0.1)
    assert len(history.as_json()["tasks"]) == KEPT_TASKS  # type: ignore[arg-type]
