"""What is particular to several ranks: ends, what their connectors say, and their loss."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from flowprefill.scheduling.events import Completed, Failed, Parked
from flowprefill.server.vllm.ranks import pool as ranked_pool
from flowprefill.server.vllm.ranks.crew import RanksLost
from flowprefill.server.vllm.ranks.flight import outcome
from flowprefill.server.vllm.ranks.messages import Ended
from support.step_pools import WAIT_S, Stage


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage(3)
    yield made
    made.collective.stop()
    assert made.close() == []


def test_a_result_carries_what_every_ranks_connector_said(stage: Stage) -> None:
    stage.submit(1, "a")
    stage.finish("a")
    assert isinstance(stage.event(), Completed)
    (result,) = stage.pool.take_results(1)
    assert result.kv_connector_output == "a sent by 0 + a sent by 1 + a sent by 2"


def test_what_connectors_said_in_a_step_that_was_unwound_is_kept_once(stage: Stage) -> None:
    stage.submit(1, "a")
    stage.pool.cancel(1)
    assert isinstance(stage.event(), Failed)
    assert stage.ranked.take_left_behind(1) == "left by 0 + left by 1 + left by 2"
    assert stage.ranked.take_left_behind(1) is None


def test_an_empty_step_runs_on_every_rank_while_others_are_parked(stage: Stage) -> None:
    stage.submit(1, "a")
    stage.pool.preempt(1, 1)
    assert isinstance(stage.event(), Parked)
    result = stage.ranked.run_empty(SimpleNamespace(name="news", total_num_scheduled_tokens=0))
    assert result.name == "news"
    assert result.kv_connector_output == "empty 0 + empty 1 + empty 2"


def test_the_progress_is_the_leaders(stage: Stage) -> None:
    stage.submit(1, "a")
    stage.pool.preempt(1, 1)
    parked = stage.event()
    assert isinstance(parked, Parked)
    assert parked.progress is not None
    stage.pool.resume(1)
    progress = stage.pool.progress()
    assert progress is not None
    assert progress.work_done >= parked.progress.work_done - 1e-9  # the page counts in billionths
    assert progress.executed_s >= parked.progress.executed_s
    stage.finish("a")
    assert isinstance(stage.event(), Completed)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_goes_away_is_the_end_of_the_engine(stage: Stage, rank: int) -> None:
    stage.submit(1, "a")
    stage.members[rank].close()
    error = stage.broken.get(timeout=WAIT_S)
    assert isinstance(error, RanksLost)
    assert f"rank {rank} has gone" in str(error)
    stage.ranked._holder = None
    with pytest.raises(RanksLost):
        stage.ranked.run_empty(SimpleNamespace(name="x", total_num_scheduled_tokens=0))


def test_a_step_that_fails_on_one_rank_alone_is_the_end_of_the_engine(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranked_pool, "STRAGGLER_TIMEOUT_S", 0.05)
    stage.submit(1, "a", fails_on=(1,))
    error = stage.broken.get(timeout=WAIT_S)
    assert isinstance(error, RanksLost)
    assert "rank 1 failed" in str(error)
    assert "a broke" in str(error)


def ended(event: Completed | Failed) -> Ended:
    return Ended(event=event, result=None, connector=None)


def test_the_end_of_a_step_is_what_all_ranks_say() -> None:
    completed, unwound = Completed(task_id=1, executed_s=2.0), Failed(task_id=1, error=None, executed_s=2.0)
    failed = Failed(task_id=1, error="it broke", executed_s=1.0)
    assert outcome([ended(completed), ended(completed)]) == completed
    assert outcome([ended(unwound), ended(unwound)]) == unwound
    assert outcome([ended(completed), ended(failed)]) == Failed(
        task_id=1, error="rank 1: it broke", executed_s=2.0
    )
    assert outcome([ended(completed), ended(unwound)]) is None, "a mistake that nothing can mend"
    assert outcome([ended(unwound), ended(completed)]) is None
