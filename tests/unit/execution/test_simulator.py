"""The simulator on cases small enough to work out by hand."""

from __future__ import annotations

import pytest

from flowprefill.engines.simulated.timetable import Timetable
from flowprefill.execution.simulated_task import Fault, SimulatedTask
from flowprefill.execution.simulator import Simulator
from flowprefill.request import Request
from flowprefill.scheduling.actions import Finish, Task, TaskItem
from flowprefill.scheduling.events import Arrival, Cancelled, CapacityFreed, Parked, Progress
from flowprefill.scheduling.kv import KVCachePool
from flowprefill.scheduling.predictor import Predictor
from flowprefill.scheduling.scheduler import Scheduler
from flowprefill.scheduling.settings import SchedulerSettings


def one_second_a_token(task: Task) -> Timetable:
    """A point before each second."""
    seconds = sum(item.num_tokens for item in task.items)
    return Timetable(
        point_offsets_s=(0.0,), layer_s=1.0, num_layers=seconds, tail_s=0.0, max_points_between_collectives=1
    )


class Run:
    def __init__(self, *, fault: Fault | None = None) -> None:
        self.finished: list[tuple[float, str, str]] = []
        self.blocking_s: list[float] = []
        self._asked_s = 0.0
        self.simulator = Simulator(
            Scheduler(
                SchedulerSettings(ageing=None, batch_token_budget=1),
                KVCachePool(100, 1),
                Predictor((0.0, 1.0, 0.0, 0.0)),
            ),
            one_second_a_token,
            on_finish=self._finish,
            record=self._record,
            fault=lambda task: fault,
        )

    def arrive(self, when_s: float, request_id: str, num_tokens: int, slo_s: float) -> None:
        request = Request(
            request_id=request_id,
            num_prompt_tokens=num_tokens,
            arrival_s=when_s,
            deadline_s=when_s + slo_s,
            ttft_slo_s=slo_s,
        )
        self.simulator.at(when_s, Arrival(requests=(request,)))

    def _finish(self, finish: Finish, now_s: float) -> None:
        self.finished.append((now_s, finish.request_id, finish.outcome))
        self.simulator.at(now_s, CapacityFreed(request_ids=(finish.request_id,)))

    def _record(self, event: object, actions: object, now_s: float) -> None:
        if isinstance(event, Arrival):
            self._asked_s = now_s
        if isinstance(event, Parked):
            self.blocking_s.append(now_s - self._asked_s)


def test_a_short_request_waits_until_the_next_point_and_the_long_one_loses_its_time_alone() -> None:
    run = Run()
    run.arrive(0.0, "long", 10, slo_s=100.0)
    run.arrive(3.25, "short", 2, slo_s=4.0)
    run.simulator.run()
    # The long one stops at 4, the short one takes 4 to 6, and the long one's other 6 seconds follow.
    assert run.finished == [(6.0, "short", "completed"), (12.0, "long", "completed")]
    assert run.blocking_s == [0.75]


def test_a_request_that_comes_exactly_at_a_point_waits_for_the_one_after() -> None:
    run = Run()
    run.arrive(0.0, "long", 10, slo_s=100.0)
    run.arrive(3.0, "short", 2, slo_s=4.0)
    run.simulator.run()
    assert run.blocking_s == [1.0]
    assert run.finished[0] == (6.0, "short", "completed")


def test_a_task_in_its_last_stretch_completes_before_it_could_park() -> None:
    run = Run()
    run.arrive(0.0, "long", 4, slo_s=100.0)
    run.simulator.at(3.5, Cancelled(request_id="nobody"))
    run.arrive(4.0, "short", 2, slo_s=4.0)
    run.simulator.run()
    assert run.finished == [(4.0, "long", "completed"), (6.0, "short", "completed")]
    assert run.blocking_s == []


def test_a_fault_ends_the_task_when_its_point_is_reached() -> None:
    run = Run(fault=Fault(error="broken", at_point=2))
    run.arrive(1.0, "a", 5, slo_s=100.0)
    run.simulator.run()
    assert run.finished == [(3.0, "a", "failed")]


def test_running_until_a_moment_leaves_the_rest_for_later() -> None:
    run = Run()
    run.arrive(0.0, "a", 4, slo_s=100.0)
    run.arrive(10.0, "b", 4, slo_s=100.0)
    run.simulator.run(until_s=9.0)
    assert run.finished == [(4.0, "a", "completed")]
    assert run.simulator.now_s <= 9.0
    run.simulator.run()
    assert run.finished[1:] == [(14.0, "b", "completed")]


def test_a_resumed_task_that_is_asked_in_the_same_breath_parks_where_it_stood() -> None:
    item = TaskItem(request_id="a", start=0, num_tokens=9, block_ids=(), completes=True)
    task = Task(task_id=1, items=(item,), predicted_s=9.0)
    run = SimulatedTask(task, one_second_a_token(task), None, 0.0)
    assert not run.wake(0.0)
    run.progress(0.5)
    run.ticket = 1
    assert run.stop_s() == 1.0
    first = run.stop(1.0)
    run.give_baton(2.0)
    run.ticket = 2
    assert run.wake(2.0)
    second = run.stop(2.0)
    progress = Progress(task_id=1, work_done=1 / 9, executed_s=1.0)
    assert first == Parked(task_id=1, ticket=1, progress=progress)
    assert second == Parked(task_id=1, ticket=2, progress=progress)


@pytest.mark.parametrize("preempted", [False, True])
def test_long_tasks_need_no_more_events_than_short_ones(preempted: bool) -> None:
    run = Run()
    run.arrive(0.0, "a", 90, slo_s=1e9)
    if preempted:
        run.arrive(40.5, "b", 2, slo_s=10.0)
    run.simulator.run()
    # Each request arrives, completes and is released; a preemption adds Parked.
    assert run.simulator.num_events == (7 if preempted else 3)
