"""The simulated engine takes the time it says, and does not compute from KV that is not there."""

from __future__ import annotations

import pytest

from flowprefill.engines.protocol import DecodeSequence, PrefillItem, SamplingParams
from flowprefill.engines.simulated.engine import SimulatedEngine
from flowprefill.engines.simulated.kv import WrongKV
from flowprefill.engines.simulated.presets import TINY
from flowprefill.execution.virtual_clock import VirtualClock


class AtPoint:
    """A gate that calls `act` at one point."""

    def __init__(self, point: int, act: object = None) -> None:
        self.raised = True
        self.index = 0
        self.times_s: list[float] = []
        self._point = point
        self._act = act

    def pause(self, index: int) -> None:
        if index == self._point and callable(self._act):
            self._act()


def engine_on(clock: VirtualClock) -> SimulatedEngine:
    return SimulatedEngine(TINY, clock, num_kv_blocks=16, block_size=4, vocab_size=100)


def item(tokens: list[int], block_ids: list[int], start: int = 0) -> PrefillItem:
    return PrefillItem(
        request_id="a", token_ids=tokens[start:], start=start, block_ids=block_ids, sample=True
    )


def play(clock: VirtualClock, script: object) -> None:
    raised: list[BaseException] = []

    def main() -> None:
        try:
            assert callable(script)
            script()
        except BaseException as error:
            raised.append(error)

    thread = clock.start_thread(main, name="script")
    thread.join(20)
    assert not thread.is_alive()
    if raised:
        raise raised[0]


def test_a_pass_takes_the_models_time_with_interruptions_left_out() -> None:
    clock = VirtualClock()
    engine = engine_on(clock)
    tokens = list(range(10))

    def script() -> None:
        plan = engine.plan_prefill([item(tokens, [0, 1, 2])], "operator")
        engine.run(plan, AtPoint(7, lambda: clock.sleep_until_s(clock.now_s() + 100.0)))

    play(clock, script)
    assert clock.now_s() == pytest.approx(100.0 + TINY.prefill_s([(10, 0)]))


def test_blocks_of_a_suspended_task_are_not_taken_for_what_they_held_before() -> None:
    clock = VirtualClock()
    engine = engine_on(clock)
    old, new = [1] * 9, [2] * 9

    def build_on_it() -> None:
        with pytest.raises(WrongKV, match="KV that is not there: position 0 of 8"):
            engine.run(engine.plan_prefill([item(new, [0, 1, 5], start=8)], "operator"), AtPoint(-1))

    def script() -> None:
        engine.run(engine.plan_prefill([item(old, [0, 1, 2])], "operator"), AtPoint(-1))
        engine.run(engine.plan_prefill([item(new, [0, 1, 2])], "operator"), AtPoint(3, build_on_it))

    play(clock, script)


def test_a_decode_step_without_its_prompts_kv_is_refused() -> None:
    clock = VirtualClock()
    engine = engine_on(clock)
    sequence = DecodeSequence(
        request_id="a",
        last_token_id=1,
        position=5,
        block_ids=[0, 1],
        sampling=SamplingParams(temperature=0.0),
    )

    def script() -> None:
        with pytest.raises(WrongKV, match="position 1 of 5"):
            engine.run(engine.plan_decode([sequence]), AtPoint(-1))

    play(clock, script)
