"""Chunked forwards: at most N tokens, filled in policy order. A prompt of n tokens takes n milliseconds."""

from __future__ import annotations

import pytest

from flowprefill.scheduling.actions import Preempt, Submit
from flowprefill.scheduling.events import Arrival, Cancelled, Completed
from support.scheduling import VirtualEngine, request, scheduler


def chunks(engine: VirtualEngine) -> list[list[tuple[str, int, int]]]:
    return [
        [(item.request_id, item.start, item.num_tokens) for item in action.task.items]
        for action in engine.actions(Submit)
        if isinstance(action, Submit)
    ]


def test_a_long_prompt_runs_in_chunks_and_finishes_once() -> None:
    engine = VirtualEngine(scheduler(chunk_tokens=400, preemption="chunk"))
    engine.arrive(request("long", 1000, slo=9.0))
    engine.run()
    assert chunks(engine) == [[("long", 0, 400)], [("long", 400, 400)], [("long", 800, 200)]]
    assert engine.outcomes == {"long": ("completed", pytest.approx(1.0))}
    assert engine.scheduler.snapshot(2.0).kv_blocks_free == 10_000


def test_a_long_prompts_chunk_shares_its_budget_with_short_prompts() -> None:
    engine = VirtualEngine(scheduler(chunk_tokens=400, preemption="chunk"))
    engine.arrive(request("long", 1000, slo=9.0))
    engine.arrive(request("a", 100, arrival=0.1, slo=2.0), request("b", 100, arrival=0.2, slo=2.0))
    engine.run()
    assert chunks(engine) == [
        [("long", 0, 400)],
        [("a", 0, 100), ("b", 0, 100), ("long", 400, 200)],
        [("long", 600, 400)],
    ]
    assert engine.outcomes["b"] == ("completed", pytest.approx(0.8))


def test_a_chunk_may_not_make_a_short_prompt_late() -> None:
    """At 0.4 s, a has 50 ms to spare: 300 tokens of the long prompt beside it would take 300."""
    engine = VirtualEngine(scheduler(chunk_tokens=400, preemption="chunk"))
    engine.arrive(request("long", 1000, slo=9.0))
    engine.arrive(request("a", 100, arrival=0.3, slo=0.25))
    engine.run()
    assert chunks(engine)[1] == [("a", 0, 100)]
    assert engine.outcomes["a"] == ("completed", pytest.approx(0.5))


def test_a_chunk_joins_only_if_the_rest_of_its_prompt_can_still_be_in_time() -> None:
    """Alone the long prompt ends at 1.0, in time for 1.05; 300 of its tokens beside the head leave 0.7 s after 0.4."""
    engine = VirtualEngine(scheduler(chunk_tokens=400, preemption="chunk", policy="fcfs"))
    engine.at(0.0, Arrival(requests=(request("head", 100, slo=9.0), request("long", 1000, slo=1.05))))
    engine.run()
    assert chunks(engine)[0] == [("head", 0, 100)]
    engine = VirtualEngine(scheduler(chunk_tokens=400, preemption="chunk", policy="fcfs"))
    engine.at(0.0, Arrival(requests=(request("head", 100, slo=9.0), request("long", 1000, slo=1.15))))
    engine.run()
    assert chunks(engine)[0] == [("head", 0, 100), ("long", 0, 300)]


def test_without_preemption_what_has_begun_goes_on_first() -> None:
    engine = VirtualEngine(scheduler(chunk_tokens=400, preemption="none"))
    engine.arrive(request("long", 1000, slo=9.0), request("a", 300, arrival=0.1, slo=2.0))
    engine.run()
    assert chunks(engine) == [
        [("long", 0, 400)],
        [("long", 400, 400)],
        [("long", 800, 200), ("a", 0, 200)],
        [("a", 200, 100)],
    ]


def test_a_chunk_can_be_preempted_inside() -> None:
    engine = VirtualEngine(scheduler(chunk_tokens=800, preemption="operator"))
    engine.arrive(request("long", 1000, slo=9.0), request("a", 100, arrival=0.2, slo=0.15))
    engine.run()
    assert len(engine.actions(Preempt)) == 1
    assert engine.outcomes["a"] == ("completed", pytest.approx(0.3))
    assert engine.outcomes["long"] == ("completed", pytest.approx(1.1))


def test_a_continuation_keeps_its_blocks_and_gives_them_back_when_cancelled_between_chunks() -> None:
    s = scheduler(chunk_tokens=400, preemption="chunk")
    s.handle(Arrival(requests=(request("long", 1600, slo=9.0),)), 0.0)
    assert s.snapshot(0.0).kv_blocks_free == 9900, "blocks of the whole prompt"
    s.handle(Arrival(requests=(request("urgent", 400, slo=1.0),)), 0.1)
    (submit,) = s.handle(Completed(task_id=1, executed_s=0.4), 0.4)
    assert submit.task.items[0].request_id == "urgent"
    assert s.snapshot(0.4).kv_blocks_free == 9875
    s.handle(Cancelled(request_id="long"), 0.5)
    assert s.snapshot(0.5).kv_blocks_free == 9975


def test_remaining_time_of_a_continuation_counts_attention_over_what_is_done() -> None:
    """Cost 1e-6 n^2 + 2e-6 n p: the second half of 2,000 tokens takes 1 + 2 s, not 1 s as if it were fresh."""
    s = scheduler(chunk_tokens=1000, preemption="chunk", coefficients=(0.0, 0.0, 1e-6, 2e-6))
    s.handle(Arrival(requests=(request("long", 2000, slo=9.0),)), 0.0)
    (submit,) = s.handle(Completed(task_id=1, executed_s=1.0), 1.0)
    assert submit.task.predicted_s == pytest.approx(3.0)


def test_a_failed_chunk_fails_its_request() -> None:
    engine = VirtualEngine(
        scheduler(chunk_tokens=400, preemption="chunk"),
        fails=lambda task: "broken" if task.items[0].start == 400 else None,
    )
    engine.arrive(request("long", 1000, slo=9.0))
    engine.run()
    assert engine.outcomes["long"][0] == "failed"
    assert engine.scheduler.snapshot(2.0).kv_blocks_free == 10_000
