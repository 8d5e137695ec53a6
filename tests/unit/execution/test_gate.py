"""The gate alone: who is answered, with which ticket, and when it raises. One thread plays both sides."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from flowprefill.engines.protocol import TaskUnwound
from flowprefill.execution.gate import PreemptionGate


class Wake:
    """A signal whose wait runs what the other side does meanwhile."""

    def __init__(self) -> None:
        self.meanwhile: list[Callable[[], None]] = []

    def set(self) -> None:
        return

    def wait(self, until_s: float | None = None) -> bool:
        self.meanwhile.pop(0)()
        return True


class Gate:
    """A gate with its lock, its answers, and the other side's moves for each time the task stands."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.answers: list[int] = []
        self.wake = Wake()
        self.gate = PreemptionGate(self.lock, self.wake, self.answers.append)

    def while_it_stands(self, *moves: Callable[[], None]) -> None:
        self.wake.meanwhile.extend(moves)


def test_an_unasked_gate_is_not_raised_and_a_stale_look_costs_one_call() -> None:
    it = Gate()
    assert not it.gate.raised
    it.gate.pause(3)
    assert it.gate.index == 3
    assert it.answers == []


def test_a_request_is_answered_once_with_its_own_ticket() -> None:
    it = Gate()
    it.gate.request(17)
    assert it.gate.raised
    it.while_it_stands(it.gate.resume)
    it.gate.pause(0)
    assert it.answers == [17]
    assert not it.gate.raised
    it.gate.pause(1)
    assert it.answers == [17]


def test_a_withdrawn_request_is_not_answered_and_the_next_one_is() -> None:
    it = Gate()
    it.gate.request(1)
    it.gate.withdraw(1)
    assert not it.gate.raised
    it.gate.pause(0)
    assert it.answers == []
    it.gate.request(2)
    it.while_it_stands(it.gate.resume)
    it.gate.pause(1)
    assert it.answers == [2]


def test_withdrawing_an_old_request_leaves_the_new_one_standing() -> None:
    it = Gate()
    it.gate.request(1)
    it.gate.request(2)
    it.gate.withdraw(1)
    assert it.gate.raised
    it.while_it_stands(it.gate.resume)
    it.gate.pause(0)
    assert it.answers == [2]


def test_a_request_made_before_the_resumed_thread_runs_is_answered_at_the_same_point() -> None:
    it = Gate()
    it.gate.request(1)

    def resume_and_ask_again() -> None:
        it.gate.resume()
        it.gate.request(2)

    it.while_it_stands(resume_and_ask_again, it.gate.resume)
    it.gate.pause(5)
    assert it.answers == [1, 2]
    assert it.gate.index == 5


def test_a_wake_up_without_a_reason_lets_nobody_go() -> None:
    it = Gate()
    it.gate.request(1)
    seen: list[bool] = []
    it.while_it_stands(lambda: seen.append(it.gate.parked), it.gate.resume)
    it.gate.pause(0)
    assert seen == [True]
    assert it.wake.meanwhile == []


def test_a_cancelled_task_unwinds_at_its_next_point_and_at_every_one_after_it() -> None:
    it = Gate()
    it.gate.request(1)
    it.gate.cancel()
    for index in range(3):
        assert it.gate.raised
        with pytest.raises(TaskUnwound):
            it.gate.pause(index)
    assert it.answers == []


def test_withdrawing_does_not_hide_a_cancellation() -> None:
    it = Gate()
    it.gate.request(1)
    it.gate.cancel()
    it.gate.withdraw(1)
    assert it.gate.raised


def test_a_parked_task_that_is_cancelled_unwinds_where_it_stands() -> None:
    it = Gate()
    it.gate.request(1)
    it.while_it_stands(it.gate.cancel)
    with pytest.raises(TaskUnwound):
        it.gate.pause(0)
    assert it.answers == [1]
    assert not it.gate.parked


def test_asking_a_parked_task_to_park_or_resuming_a_running_one_is_a_mistake() -> None:
    it = Gate()
    with pytest.raises(AssertionError):
        it.gate.resume()
    it.gate.request(1)

    def ask() -> None:
        with pytest.raises(AssertionError):
            it.gate.request(2)
        it.gate.resume()

    it.while_it_stands(ask)
    it.gate.pause(0)


def test_an_unasked_check_reads_one_attribute() -> None:
    # The engine's whole check is `if gate.raised`: a slot, neither a property nor a lock.
    assert "raised" in PreemptionGate.__slots__
    assert not isinstance(PreemptionGate.__dict__["raised"], property)
