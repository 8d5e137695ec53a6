"""The pool: one task advances, parked ones wait in any number and go on in any order, and all of them end."""

from __future__ import annotations

import random

import pytest

from flowprefill.execution.collective import RanPastStop
from flowprefill.execution.pool import TaskEvent
from flowprefill.scheduling.events import Completed, Failed, Parked, Progress
from support.ladder import Stage, ladder_task


def parked(task_id: int, ticket: int, *, steps_done: int, of: int, executed_s: float) -> Parked:
    progress = Progress(task_id=task_id, work_done=steps_done / of, executed_s=executed_s)
    return Parked(task_id=task_id, ticket=ticket, progress=progress)


def test_a_task_runs_to_its_end_and_gives_its_results_once() -> None:
    def script(stage: Stage) -> None:
        stage.submit(1, "a", 3)
        stage.until(10)
        assert stage.events == [(3.0, Completed(task_id=1, executed_s=3.0))]
        assert stage.pool.take_results(1) == (3,)
        with pytest.raises(KeyError):
            stage.pool.take_results(1)

    Stage().play(script)


def test_a_task_parks_at_its_next_point_and_goes_on_where_it_stood() -> None:
    def script(stage: Stage) -> None:
        stage.submit(1, "a", 5)
        stage.until(1.5)
        stage.pool.preempt(1, 41)
        stage.until(7)
        assert stage.events == [(2.0, parked(1, 41, steps_done=2, of=5, executed_s=2.0))]
        assert stage.pool.progress() is None
        stage.pool.resume(1)
        stage.until(20)
        assert stage.events[1:] == [(10.0, Completed(task_id=1, executed_s=5.0))]

    Stage().play(script)


def test_parked_time_is_not_executed_time() -> None:
    def script(stage: Stage) -> None:
        stage.submit(1, "a", 4)
        stage.until(0.5)
        stage.pool.preempt(1, 1)
        stage.until(100)
        stage.pool.resume(1)
        stage.until(101.5)
        progress = stage.pool.progress()
        assert progress == Progress(task_id=1, work_done=0.5, executed_s=2.5)

    Stage().play(script)


@pytest.mark.parametrize("seed", range(8))
def test_tasks_nest_to_any_depth_and_resume_in_any_order(seed: int) -> None:
    chance = random.Random(seed)
    depth = 12
    names = [f"t{number}" for number in range(depth)]

    def script(stage: Stage) -> None:
        now_s = 0.0
        for number, name in enumerate(names):
            stage.submit(number, name, 4)
            if number < depth - 1:
                now_s += chance.choice([0.0, 0.5, 1.5, 2.5])
                stage.until(now_s)
                stage.pool.preempt(number, number)
                now_s += 1.0
                stage.until(now_s)
                assert isinstance(stage.events[-1][1], Parked)
        stage.until(now_s + 4)
        order = list(range(depth - 1))
        chance.shuffle(order)
        for number in order:
            stage.pool.resume(number)
            stage.until(stage.clock.now_s() + 4)
        ended = [event for _, event in stage.events if isinstance(event, Completed)]
        assert [event.task_id for event in ended] == [depth - 1, *order]
        assert {event.executed_s for event in ended} == {4.0}
        for name in names:
            assert [step for _, who, step in stage.engine.steps if who == name] == [0, 1, 2, 3]

    Stage().play(script)


def test_submitting_or_resuming_while_a_task_advances_is_refused() -> None:
    def script(stage: Stage) -> None:
        stage.submit(1, "a", 5)
        stage.until(0.5)
        stage.pool.preempt(1, 1)
        stage.until(2)
        stage.submit(2, "b", 5)
        with pytest.raises(AssertionError, match="task 2 holds the baton"):
            stage.pool.resume(1)
        with pytest.raises(AssertionError, match="task 2 holds the baton"):
            stage.submit(3, "c", 5)

    Stage().play(script)


def test_a_completion_that_overtakes_the_pause_request_leaves_nothing_to_answer() -> None:
    def script(stage: Stage) -> None:
        stage.submit(1, "a", 3)
        stage.until(2.5)  # its last point is behind it
        stage.pool.preempt(1, 1)
        stage.until(9)
        stage.pool.withdraw(1, 1)
        stage.pool.preempt(1, 2)
        stage.pool.cancel(1)
        stage.until(10)
        assert stage.events == [(3.0, Completed(task_id=1, executed_s=3.0))]

    Stage().play(script)


def test_a_withdrawn_request_stops_nobody() -> None:
    def script(stage: Stage) -> None:
        stage.submit(1, "a", 3)
        stage.until(0.5)
        stage.pool.preempt(1, 1)
        stage.pool.withdraw(1, 1)
        stage.until(9)
        assert stage.events == [(3.0, Completed(task_id=1, executed_s=3.0))]

    Stage().play(script)


def test_a_request_to_a_task_that_parked_for_a_withdrawn_one_is_answered_at_once() -> None:
    def script(stage: Stage) -> None:
        stage.submit(1, "a", 3)
        stage.pool.preempt(1, 1)
        stage.until(0.5)
        stage.pool.withdraw(1, 1)  # too late: it stands
        stage.pool.preempt(1, 2)
        stage.until(1)
        first = parked(1, 1, steps_done=0, of=3, executed_s=0.0)
        second = parked(1, 2, steps_done=0, of=3, executed_s=0.0)
        assert stage.events == [(0.0, first), (0.5, second)]
        stage.pool.resume(1)
        stage.until(9)
        assert stage.events[2:] == [(4.0, Completed(task_id=1, executed_s=3.0))]

    Stage().play(script)


def test_a_running_task_is_cancelled_at_its_next_point() -> None:
    def script(stage: Stage) -> None:
        stage.submit(1, "a", 9)
        stage.until(2.5)
        stage.pool.cancel(1)
        stage.until(5)
        assert stage.events == [(3.0, Failed(task_id=1, error=None, executed_s=3.0))]
        assert stage.engine.unwound == ["a"]
        stage.submit(2, "b", 1)
        stage.until(9)
        assert stage.events[1:] == [(6.0, Completed(task_id=2, executed_s=1.0))]

    Stage().play(script)


def test_a_task_cancelled_before_it_began_never_runs() -> None:
    def script(stage: Stage) -> None:
        stage.submit(1, "a", 9)
        stage.pool.cancel(1)
        stage.until(5)
        assert stage.events == [(0.0, Failed(task_id=1, error=None, executed_s=0.0))]
        assert stage.engine.planned == []

    Stage().play(script)


def test_a_parked_task_is_cancelled_where_it_stands_while_another_goes_on() -> None:
    def script(stage: Stage) -> None:
        stage.submit(1, "a", 9)
        stage.pool.preempt(1, 1)
        stage.until(0.5)
        stage.submit(2, "b", 4)
        stage.until(2)
        stage.pool.cancel(1)
        stage.until(3)
        assert stage.events[1:] == [(2.0, Failed(task_id=1, error=None, executed_s=0.0))]
        assert [who for _, who, _ in stage.engine.steps] == ["b", "b"]
        stage.until(9)
        assert stage.events[2:] == [(4.5, Completed(task_id=2, executed_s=4.0))]

    Stage().play(script)


def test_a_resumed_task_that_is_cancelled_in_the_same_breath_gives_the_baton_back() -> None:
    def script(stage: Stage) -> None:
        stage.submit(1, "a", 9)
        stage.pool.preempt(1, 1)
        stage.until(1)
        stage.pool.resume(1)
        stage.pool.cancel(1)
        stage.until(2)
        assert stage.events[1:] == [(1.0, Failed(task_id=1, error=None, executed_s=0.0))]
        stage.submit(2, "b", 1)

    Stage().play(script)


def test_a_resumed_task_that_is_asked_in_the_same_breath_parks_where_it_stood() -> None:
    def script(stage: Stage) -> None:
        stage.submit(1, "a", 9)
        stage.until(0.5)
        stage.pool.preempt(1, 1)
        stage.until(2)
        stage.pool.resume(1)
        stage.pool.preempt(1, 2)
        stage.until(4)
        assert stage.events == [
            (1.0, parked(1, 1, steps_done=1, of=9, executed_s=1.0)),
            (2.0, parked(1, 2, steps_done=1, of=9, executed_s=1.0)),
        ]

    Stage().play(script)


def failures(stage: Stage) -> list[tuple[float, TaskEvent]]:
    return [(when_s, event) for when_s, event in stage.events if isinstance(event, Failed)]


def test_an_engine_error_fails_its_own_task_and_no_other() -> None:
    def script(stage: Stage) -> None:
        stage.engine.fail_at["bad"] = 2
        stage.submit(1, "good", 6)
        stage.pool.preempt(1, 1)
        stage.until(0.5)
        stage.submit(2, "bad", 6)
        stage.until(5)
        [(when_s, event)] = failures(stage)
        assert when_s == 2.5
        assert event == Failed(
            task_id=2,
            error="the engine failed in a batch of 1: RuntimeError: bad broke at 2",
            executed_s=2.0,
        )
        stage.pool.resume(1)
        stage.until(20)
        assert stage.events[-1] == (11.0, Completed(task_id=1, executed_s=6.0))

    Stage().play(script)


def test_an_error_while_planning_fails_the_task() -> None:
    def script(stage: Stage) -> None:
        stage.engine.fail_plan.add("bad")
        stage.submit(1, "bad", 6)
        stage.until(1)
        [(_, event)] = failures(stage)
        assert event == Failed(
            task_id=1, error="the engine failed in a batch of 1: RuntimeError: cannot lay out bad"
        )
        stage.submit(2, "good", 1)
        stage.until(3)
        assert stage.events[-1][1] == Completed(task_id=2, executed_s=1.0)

    Stage().play(script)


def test_an_error_on_the_way_out_of_a_cancelled_task_is_told() -> None:
    def script(stage: Stage) -> None:
        stage.engine.fail_unwind.add("a")
        stage.submit(1, "a", 6)
        stage.until(0.5)
        stage.pool.cancel(1)
        stage.until(3)
        [(_, event)] = failures(stage)
        assert event == Failed(
            task_id=1,
            error="the engine failed in a batch of 1: RuntimeError: a could not let go",
            executed_s=1.0,
        )

    Stage().play(script)


def test_every_thread_enters_the_engines_context_once_and_leaves_it() -> None:
    def script(stage: Stage) -> None:
        for task_id in range(5):  # one after the other: one thread does it all
            stage.submit(task_id, f"t{task_id}", 1)
            stage.until(2.0 * (task_id + 1))
        assert stage.engine.contexts_entered == 1
        assert stage.pool.num_threads == 1

    stage = Stage()
    stage.play(script)
    assert stage.engine.contexts_open == 0


def test_a_thread_whose_context_fails_fails_its_task_and_the_next_thread_is_tried() -> None:
    def script(stage: Stage) -> None:
        stage.engine.fail_context = True
        stage.submit(1, "a", 1)
        stage.until(1)
        [(_, event)] = failures(stage)
        assert event == Failed(
            task_id=1, error="the engine failed in a batch of 1: RuntimeError: no device for this thread"
        )
        stage.engine.fail_context = False
        stage.submit(2, "b", 1)
        stage.until(5)
        assert stage.events[-1][1] == Completed(task_id=2, executed_s=1.0)

    Stage().play(script)


def test_idle_threads_are_kept_up_to_a_limit() -> None:
    def script(stage: Stage) -> None:
        for task_id in range(6):
            stage.submit(task_id, f"t{task_id}", 2)
            stage.pool.preempt(task_id, task_id)
            stage.until(task_id + 1)
        assert stage.pool.num_threads == 6
        for task_id in range(6):
            stage.pool.resume(task_id)
            stage.until(10 + 3 * task_id)
        assert stage.pool.num_threads == 2

    Stage(max_idle_threads=2).play(script)


def test_close_unwinds_running_and_parked_tasks_and_joins_their_threads() -> None:
    stage = Stage()

    def script(stage: Stage) -> None:
        for task_id in range(4):
            stage.submit(task_id, f"t{task_id}", 50)
            if task_id < 3:
                stage.pool.preempt(task_id, task_id)
            stage.until(task_id + 1.5)
        stage.pool.stop()  # what `close` does first, at an instant of our choice

    stage.play(script)
    assert sorted(stage.engine.unwound) == ["t0", "t1", "t2", "t3"]
    assert {type(event) for _, event in stage.events if not isinstance(event, Parked)} == {Failed}
    with pytest.raises(AssertionError, match="closed"):
        stage.pool.submit(*ladder_task(9, "late", 1))


def test_an_error_of_the_pool_itself_is_told_to_its_owner() -> None:
    stage = Stage()
    stage.pool.connect(_refuse, stage.broken.append)

    def script(stage: Stage) -> None:
        stage.submit(1, "a", 1)
        stage.until(5)

    stage.play(script, close=False)
    assert [str(error) for error in stage.broken] == ["nobody takes events"]


def test_ranks_that_cannot_meet_again_are_fatal_and_not_one_tasks_failure() -> None:
    stage = Stage()

    def script(stage: Stage) -> None:
        stage.engine.errors["a"] = RanPastStop("rank 1 is at point 9, and the ranks agreed on 8")
        stage.submit(1, "a", 2)
        stage.until(5)

    stage.play(script, close=False)
    assert [type(error) for error in stage.broken] == [RanPastStop]
    assert stage.events == []


def _refuse(event: TaskEvent) -> None:
    raise RuntimeError("nobody takes events")
