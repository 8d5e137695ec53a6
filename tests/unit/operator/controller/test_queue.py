"""The work queue on virtual time: what is worked on, when, and how often."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable

import pytest

from flowprefill_operator.controller.queue import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, Key, WorkQueue
from support.virtual_time import run

A: Key = ("ns", "a")
B: Key = ("ns", "b")
GAP_S = 0.3


class Worked:
    """What was worked on and when each pass began; a pass takes `takes_s` and ends as `outcome` says."""

    def __init__(self, *, takes_s: float = 0.1) -> None:
        self.queue = WorkQueue(min_gap_s=GAP_S)
        self.passes: list[tuple[Key, float]] = []
        self.outcome: Callable[[Key], float | None] = lambda key: None
        self.takes_s = takes_s
        self.at_once: dict[Key, int] = {}
        self.most_at_once = 0

    async def handle(self, key: Key) -> float | None:
        self.passes.append((key, round(asyncio.get_running_loop().time(), 6)))
        self.at_once[key] = self.at_once.get(key, 0) + 1
        assert self.at_once[key] == 1, f"{key} is worked on twice at the same time"
        self.most_at_once = max(self.most_at_once, sum(self.at_once.values()))
        try:
            await asyncio.sleep(self.takes_s)
            return self.outcome(key)
        finally:
            self.at_once[key] -= 1

    def times(self, key: Key = A) -> list[float]:
        return [at for worked, at in self.passes if worked == key]

    def run(self, script: Callable[[], Awaitable[None]], *, until_s: float, workers: int = 3) -> None:
        """Work while `script` adds keys, until a moment on the virtual clock."""

        async def main() -> None:
            working = asyncio.create_task(self.queue.work(self.handle, workers=workers))
            await script()
            await asyncio.sleep(until_s - asyncio.get_running_loop().time())
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working

        run(main())


def test_triggers_before_a_pass_are_one_pass() -> None:
    worked = Worked()

    async def script() -> None:
        for _ in range(5):
            worked.queue.add(A)
        assert len(worked.queue) == 1

    worked.run(script, until_s=10)
    assert worked.times() == [0.0]


def test_triggers_during_a_pass_are_one_more_pass_after_the_gap() -> None:
    worked = Worked(takes_s=1.0)

    async def script() -> None:
        worked.queue.add(A)
        for _ in range(5):
            await asyncio.sleep(0.1)
            worked.queue.add(A)

    worked.run(script, until_s=10)
    assert worked.times() == [0.0, pytest.approx(1.0 + GAP_S)]


def test_triggers_within_the_gap_wait_for_its_end_and_later_ones_do_not_wait() -> None:
    worked = Worked(takes_s=0.1)

    async def script() -> None:
        worked.queue.add(A)
        await asyncio.sleep(0.2)
        worked.queue.add(A)
        worked.queue.add(A)
        await asyncio.sleep(4.8)
        worked.queue.add(A)

    worked.run(script, until_s=10)
    assert worked.times() == [0.0, pytest.approx(0.1 + GAP_S), 5.0]


def test_a_key_is_worked_on_by_one_worker_while_others_go_on_beside_it() -> None:
    worked = Worked(takes_s=1.0)

    async def script() -> None:
        for number in range(20):
            worked.queue.add(A)
            worked.queue.add(B)
            worked.queue.add(("ns", str(number)))
            await asyncio.sleep(0.25)

    worked.run(script, until_s=60, workers=3)
    assert worked.most_at_once == 3
    assert {key for key, _ in worked.passes} == {A, B, *(("ns", str(n)) for n in range(20))}


def test_keys_are_worked_on_in_the_order_in_which_they_came() -> None:
    worked = Worked(takes_s=1.0)

    async def script() -> None:
        for name in "cab":
            worked.queue.add(("ns", name))

    worked.run(script, until_s=10, workers=1)
    assert [key[1] for key, _ in worked.passes] == ["c", "a", "b"]


def test_a_pass_that_wants_another_gets_it_and_the_earliest_time_wins() -> None:
    worked = Worked(takes_s=0.0)
    wishes = iter([5.0, None])
    worked.outcome = lambda key: next(wishes)

    async def script() -> None:
        worked.queue.add(A)
        await asyncio.sleep(1)
        worked.queue.add_after(A, 60)  # later than what is wished: no change
        worked.queue.add_after(B, 60)
        worked.queue.add_after(B, 3)
        worked.queue.add_after(B, 30)

    worked.outcome = lambda key: next(wishes) if key == A else None
    worked.run(script, until_s=100)
    assert worked.times(A) == [0.0, 5.0]
    assert worked.times(B) == [4.0]


def test_a_trigger_takes_the_place_of_a_later_time() -> None:
    worked = Worked(takes_s=0.0)

    async def script() -> None:
        worked.queue.add_after(A, 50)
        await asyncio.sleep(2)
        worked.queue.add(A)

    worked.run(script, until_s=100)
    assert worked.times() == [2.0]


def test_a_time_that_comes_during_a_pass_is_one_more_pass() -> None:
    worked = Worked(takes_s=2.0)

    async def script() -> None:
        worked.queue.add(A)
        await asyncio.sleep(0.5)
        worked.queue.add_after(A, 1.0)

    worked.run(script, until_s=20)
    assert worked.times() == [0.0, pytest.approx(2.0 + GAP_S)]


def test_passes_that_fail_are_repeated_with_growing_pauses_up_to_a_longest() -> None:
    worked = Worked(takes_s=0.0)

    def fail(key: Key) -> float | None:
        raise RuntimeError("no")

    worked.outcome = fail

    async def script() -> None:
        worked.queue.add(A)

    worked.run(script, until_s=120)
    times = worked.times()
    pauses = [round(after - before, 6) for before, after in itertools.pairwise(times)]
    assert pauses[:6] == [FIRST_BACKOFF_S, 1.0, 2.0, 4.0, 8.0, LONGEST_BACKOFF_S]
    assert set(pauses[5:]) == {LONGEST_BACKOFF_S}


def test_a_pass_that_succeeds_resets_the_pause_and_one_key_s_failures_are_no_other_s() -> None:
    worked = Worked(takes_s=0.0)
    fails = iter([True, True, True, False, True, False])

    def outcome(key: Key) -> float | None:
        if key == A and next(fails):
            raise RuntimeError("no")
        return 10.0 if key == A and len(worked.times()) == 4 else None

    worked.outcome = outcome

    async def script() -> None:
        worked.queue.add(A)
        worked.queue.add(B)

    worked.run(script, until_s=60)
    # 0, fails; 0.5, fails; 1.5, fails; 3.5, succeeds and wants more; 13.5, fails; 0.5 s later it succeeds.
    assert worked.times(A) == [0.0, 0.5, 1.5, 3.5, 13.5, 14.0]
    assert worked.times(B) == [0.0]


def test_what_is_known_of_keys_that_are_gone_is_forgotten() -> None:
    worked = Worked(takes_s=0.0)

    async def script() -> None:
        worked.queue.add(A)
        await asyncio.sleep(0.1)
        worked.queue.keep_only({B})
        worked.queue.add(A)

    worked.run(script, until_s=20)
    # Without the gap that the end of a pass just before would ask for.
    assert worked.times(A) == [0.0, 0.1]


def test_the_work_ends_when_it_is_cancelled_in_the_middle_of_a_pass() -> None:
    worked = Worked(takes_s=100.0)

    async def script() -> None:
        worked.queue.add(A)
        await asyncio.sleep(1)

    worked.run(script, until_s=2)
    assert worked.at_once == {A: 0}


def test_triggers_do_not_shorten_the_pause_after_a_failure() -> None:
    worked = Worked(takes_s=0.0)
    fails = iter([True, True, True, False, False])

    def outcome(key: Key) -> float | None:
        if next(fails):
            raise RuntimeError("no")
        return None

    worked.outcome = outcome

    async def script() -> None:
        for _ in range(36):
            worked.queue.add(A)
            await asyncio.sleep(0.1)

    worked.run(script, until_s=20)
    assert worked.times()[:4] == [0.0, 0.5, 1.5, 3.5]


def test_triggers_during_a_pass_that_fails_do_not_shorten_its_pause_either() -> None:
    worked = Worked(takes_s=1.0)

    def fail(key: Key) -> float | None:
        raise RuntimeError("no")

    worked.outcome = fail

    async def script() -> None:
        worked.queue.add(A)
        for _ in range(60):
            await asyncio.sleep(0.25)
            worked.queue.add(A)

    worked.run(script, until_s=15)
    # A pass of a second, then 0.5, 1, 2 and 4 seconds of pause.
    assert worked.times() == [0.0, 1.5, 3.5, 6.5, 11.5]
