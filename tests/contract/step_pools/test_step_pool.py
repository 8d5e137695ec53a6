"""What the loop relies on, of the pool in one process and of the one over ranks alike."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from flowprefill.scheduling.events import Completed, Failed, Parked
from support.step_pools import Stage


@pytest.fixture(params=[1, 2, 3], ids=["one process", "two ranks", "three ranks"])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A pool; afterwards it closes and leaves no thread."""
    made = Stage(request.param)
    yield made
    assert made.close() == []
    assert made.broken.empty()


def same_on_all_ranks(stage: Stage) -> None:
    first, *others = stage.engines
    assert all(engine.passed == first.passed for engine in others)
    assert all(sorted(engine.unwound) == sorted(first.unwound) for engine in others)


def park(stage: Stage, task_id: int, ticket: int) -> Parked:
    stage.pool.preempt(task_id, ticket)
    event = stage.event()
    assert isinstance(event, Parked)
    assert (event.task_id, event.ticket) == (task_id, ticket)
    assert stage.pool.progress() is None, "a parked step has no baton"
    return event


def test_a_step_runs_to_its_end_and_gives_its_result_once(stage: Stage) -> None:
    stage.submit(1, "a")
    progress = stage.pool.progress()
    assert progress is not None
    assert progress.task_id == 1
    stage.finish("a")
    event = stage.event()
    assert isinstance(event, Completed)
    assert stage.pool.progress() is None
    (result,) = stage.pool.take_results(1)
    assert result.name == "a"
    with pytest.raises(KeyError):
        stage.pool.take_results(1)
    same_on_all_ranks(stage)


def test_a_parked_step_goes_on_where_it_stood_after_another_has_run(stage: Stage) -> None:
    stage.submit(1, "a")
    park(stage, 1, 7)
    before = list(stage.engines[0].passed)
    stage.submit(2, "b")
    stage.finish("b")
    assert stage.event().task_id == 2
    stage.pool.resume(1)
    stage.finish("a")
    assert isinstance(stage.event(), Completed)
    passed = stage.engines[0].passed
    of_a = [index for name, index in passed if name == "a"]
    assert of_a == list(range(len(of_a))), "every point once, in order"
    assert passed[: len(before)] == before
    assert passed[len(before)][0] == "b"
    same_on_all_ranks(stage)


@pytest.mark.parametrize("seed", range(4))
def test_steps_nest_to_any_depth_and_go_on_in_any_order(stage: Stage, seed: int) -> None:
    chance = random.Random(seed)
    depth = 6
    for number in range(depth):
        stage.submit(number, f"t{number}")
        park(stage, number, number)
    order = list(range(depth))
    chance.shuffle(order)
    for number in order:
        stage.pool.resume(number)
        if chance.random() < 0.5:
            park(stage, number, 100 + number)
            stage.pool.resume(number)
        stage.finish(f"t{number}")
        event = stage.event()
        assert isinstance(event, Completed)
        assert event.task_id == number
    same_on_all_ranks(stage)


def test_a_withdrawn_request_is_answered_or_forgotten(stage: Stage) -> None:
    stage.submit(1, "a")
    stage.collective.wait_started("a")
    stage.pool.preempt(1, 1)
    stage.pool.withdraw(1, 1)
    stage.finish("a")
    event = stage.event()
    if isinstance(event, Parked):  # too late: it stood already
        stage.pool.resume(1)
        event = stage.event()
    assert isinstance(event, Completed)
    same_on_all_ranks(stage)


def test_a_completion_that_overtakes_what_was_asked_leaves_nothing_to_answer(stage: Stage) -> None:
    stage.submit(1, "a")
    stage.finish("a")
    assert isinstance(stage.event(), Completed)
    stage.pool.withdraw(1, 1)
    stage.pool.preempt(1, 2)
    stage.pool.cancel(1)
    stage.submit(2, "b")
    stage.finish("b")
    assert stage.event().task_id == 2
    assert stage.nothing_more


def test_a_running_step_is_cancelled(stage: Stage) -> None:
    stage.submit(1, "a")
    stage.pool.cancel(1)
    event = stage.event()
    assert isinstance(event, Failed)
    assert event.error is None
    assert stage.pool.progress() is None
    stage.submit(2, "b")
    stage.finish("b")
    assert isinstance(stage.event(), Completed)
    same_on_all_ranks(stage)
    assert stage.engines[0].unwound == ["a"]


def test_a_parked_step_is_cancelled_while_another_goes_on(stage: Stage) -> None:
    stage.submit(1, "a")
    park(stage, 1, 1)
    stage.submit(2, "b")
    stage.pool.cancel(1)
    event = stage.event()
    assert isinstance(event, Failed)
    assert event.task_id == 1
    progress = stage.pool.progress()
    assert progress is not None
    assert progress.task_id == 2, "the other still has the baton"
    stage.finish("b")
    assert isinstance(stage.event(), Completed)
    same_on_all_ranks(stage)


def test_a_step_asked_again_in_the_same_breath_as_it_goes_on_parks_again(stage: Stage) -> None:
    stage.submit(1, "a")
    park(stage, 1, 1)
    stage.pool.resume(1)
    park(stage, 1, 2)
    stage.pool.resume(1)
    stage.pool.cancel(1)
    assert isinstance(stage.event(), Failed)
    same_on_all_ranks(stage)


def test_an_error_of_the_engine_fails_its_step_and_no_other(stage: Stage) -> None:
    stage.submit(1, "good")
    park(stage, 1, 1)
    stage.submit(2, "bad", fails_on=(0, 1, 2))
    event = stage.event()
    assert isinstance(event, Failed)
    assert event.error is not None
    assert "RuntimeError: bad broke" in event.error
    stage.pool.resume(1)
    stage.finish("good")
    assert isinstance(stage.event(), Completed)


def test_a_second_step_while_one_advances_is_refused(stage: Stage) -> None:
    stage.submit(1, "a")
    park(stage, 1, 1)
    stage.submit(2, "b")
    with pytest.raises(AssertionError, match="task 2 holds the baton"):
        stage.pool.resume(1)
    with pytest.raises(AssertionError, match="task 2 holds the baton"):
        stage.submit(3, "c")


def test_close_unwinds_what_runs_and_what_is_parked(stage: Stage) -> None:
    stage.submit(1, "a")
    park(stage, 1, 1)
    stage.submit(2, "b")
    stage.collective.wait_started("b")
    assert stage.close() == []
    assert all(sorted(engine.unwound) == ["a", "b"] for engine in stage.engines)
