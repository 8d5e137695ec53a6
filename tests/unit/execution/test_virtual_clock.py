"""Time jumps when everybody waits; at one instant threads go on one at a time, in a fixed order."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from flowprefill.execution.virtual_clock import VirtualClock


def play(*scripts: Callable[[VirtualClock], None], clock: VirtualClock | None = None) -> VirtualClock:
    """Run the scripts as threads that begin at one instant, in order, until all wait or have ended."""
    clock = clock or VirtualClock()

    def start() -> None:
        for number, script in enumerate(scripts):
            clock.start_thread(lambda script=script: script(clock), name=f"script-{number}", rank=number)

    clock.start_thread(start, name="start")
    assert clock.wait_at_rest(20)
    return clock


def test_sleepers_wake_in_order_of_time_and_the_clock_shows_it() -> None:
    seen: list[tuple[str, float]] = []

    def sleeper(name: str, *whens_s: float) -> Callable[[VirtualClock], None]:
        def script(clock: VirtualClock) -> None:
            for when_s in whens_s:
                clock.sleep_until_s(when_s)
                seen.append((name, clock.now_s()))

        return script

    play(sleeper("a", 3.0, 10.0), sleeper("b", 1.0, 1.0, 3600.0), sleeper("c", 2.5))
    assert seen == [("b", 1.0), ("b", 1.0), ("c", 2.5), ("a", 3.0), ("a", 10.0), ("b", 3600.0)]


def test_at_one_instant_the_lower_rank_wakes_first_and_runs_until_it_waits() -> None:
    seen: list[str] = []

    def script(name: str) -> Callable[[VirtualClock], None]:
        def run(clock: VirtualClock) -> None:
            for _ in range(3):
                clock.sleep_until_s(clock.now_s() + 1.0)
                seen.extend([name, name.upper()])

        return run

    play(script("a"), script("b"), script("c"))
    assert "".join(seen) == "aAbBcC" * 3


def test_a_signal_wakes_its_waiter_at_the_same_instant_before_time_moves() -> None:
    clock = VirtualClock()
    signal = clock.signal()
    seen: list[object] = []

    def waiter(clock: VirtualClock) -> None:
        seen.append(("woken", signal.wait(until_s=100.0), clock.now_s()))
        seen.append(("timed out", signal.wait(until_s=7.0), clock.now_s()))

    def setter(clock: VirtualClock) -> None:
        clock.sleep_until_s(5.0)
        signal.set()
        signal.set()
        seen.append("set")
        clock.sleep_until_s(6.0)
        seen.append("slept")

    play(waiter, setter, clock=clock)
    assert seen == ["set", ("woken", True, 5.0), "slept", ("timed out", False, 7.0)]


def test_a_signal_set_before_anybody_waits_is_kept() -> None:
    clock = VirtualClock()
    signal = clock.signal()
    signal.set()
    seen: list[bool] = []

    def waiter(clock: VirtualClock) -> None:
        seen.append(signal.wait())
        seen.append(signal.wait(until_s=1.0))

    play(waiter, clock=clock)
    assert seen == [True, False]


def test_a_signal_from_outside_wakes_a_clock_at_rest() -> None:
    clock = VirtualClock()
    signal = clock.signal()
    woken = threading.Event()

    def waiter(clock: VirtualClock) -> None:
        signal.wait()
        woken.set()

    play(waiter, clock=clock)
    assert not woken.is_set()
    signal.set()
    assert woken.wait(20)


def test_a_thread_of_no_clock_may_not_wait_on_it() -> None:
    clock = VirtualClock()
    with pytest.raises(RuntimeError, match="only threads started by start_thread may"):
        clock.sleep_until_s(1.0)
    with pytest.raises(RuntimeError, match="only threads started by start_thread may"):
        clock.signal().wait()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_raises_lets_the_others_go_on() -> None:
    seen: list[str] = []
    failing: list[threading.Thread] = []

    def fails(clock: VirtualClock) -> None:
        failing.append(threading.current_thread())
        clock.sleep_until_s(1.0)
        raise SystemExit

    def goes_on(clock: VirtualClock) -> None:
        clock.sleep_until_s(2.0)
        seen.append("here")

    play(fails, goes_on)
    failing[0].join(20)
    assert seen == ["here"]
