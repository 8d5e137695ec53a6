"""The launch window over a device whose events pass when the test says."""

from __future__ import annotations

import pytest

from flowprefill.engines.window import LaunchWindow


class Device:
    """Counts what was launched; each query lets one more launch finish."""

    def __init__(self, *, finishes: bool = True) -> None:
        self.launched = 0
        self.done = 0
        self.most_in_flight = 0
        self.finishes = finishes
        self.asked = 0
        self.on_query = lambda: None

    def event(self) -> Event:
        return Event(self)

    def launch(self) -> None:
        self.launched += 1
        self.most_in_flight = max(self.most_in_flight, self.launched - self.done)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._at: int | None = None

    def record(self) -> None:
        self._at = self._device.launched

    def query(self) -> bool:
        device = self._device
        device.asked += 1
        device.on_query()
        if device.finishes and device.done < device.launched:
            device.done += 1
        assert self._at is not None, "an event is recorded before it is asked"
        return device.done >= self._at


class Gate:
    raised = False
    index = 0

    def pause(self, index: int) -> None:
        raise AssertionError("the window asks nobody to pause")


@pytest.mark.parametrize("lookahead", [1, 2, 3, 5])
def test_no_more_operators_are_in_flight_than_the_lookahead(lookahead: int) -> None:
    device = Device()
    window = LaunchWindow(device.event, lookahead)
    for _ in range(50):
        window.advance(Gate())
        device.launch()
    assert device.most_in_flight == lookahead


def test_a_pause_request_ends_the_wait_and_nothing_is_launched_beyond() -> None:
    device, gate = Device(finishes=False), Gate()
    window = LaunchWindow(device.event, 2)
    for _ in range(3):  # the third looks at an event from before the first launch, which has passed
        window.advance(gate)
        device.launch()
    device.asked = 0

    def ask_on_third_query() -> None:
        gate.raised = device.asked >= 3

    device.on_query = ask_on_third_query
    window.advance(gate)  # would wait for ever without the request
    assert device.asked == 3
    # After the pause the wait goes on where it was.
    gate.raised, device.finishes = False, True
    device.on_query = lambda: None
    window.advance(gate)
    assert device.done >= 1


def test_a_lookahead_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="lookahead"):
        LaunchWindow(Device().event, 0)
