"""On a GPU launches run ahead; a step's points keep them within a window, and a pause request is seen while they wait."""

from __future__ import annotations

from flowprefill.engines.vllm_engine.stint import Stage, Stint
from flowprefill.engines.window import LaunchWindow


class FakeDevice:
    """Marks in a device's queue; the device comes one mark further each time somebody asks about one it has not reached."""

    def __init__(self) -> None:
        self.recorded = 0
        self.reached = 0
        self.furthest_ahead = 0

    def event(self) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._mark = 0

    def record(self) -> None:
        self._device.recorded += 1
        self._mark = self._device.recorded
        self._device.furthest_ahead = max(
            self._device.furthest_ahead, self._device.recorded - self._device.reached
        )

    def query(self) -> bool:
        passed = self._device.reached >= self._mark
        if not passed:
            self._device.reached += 1
        return passed


class FakeGate:
    def __init__(self) -> None:
        self.raised = False
        self.index = 0
        self.paused_at: list[int] = []

    def pause(self, index: int) -> None:
        self.paused_at.append(index)
        self.raised = False


def test_launches_stay_within_the_window() -> None:
    device, gate = FakeDevice(), FakeGate()
    stage = Stage()
    stint = Stint(stage, gate, "operator", LaunchWindow(device.event, 3))
    with stint:
        for _ in range(100):
            stint.point()
    assert device.recorded == 100
    assert device.furthest_ahead == 3


def test_a_pause_request_is_answered_without_waiting_for_the_device() -> None:
    device, gate = FakeDevice(), FakeGate()
    stage = Stage()
    stint = Stint(stage, gate, "operator", LaunchWindow(device.event, 2))
    with stint:
        for _ in range(5):
            stint.point()
        reached = device.reached
        gate.raised = True
        stint.point()
        assert gate.paused_at == [5]
        assert device.reached <= reached + 1
        assert stage.stint is stint, "it is on the stage again"
        stint.point()
    assert stage.stint is None
