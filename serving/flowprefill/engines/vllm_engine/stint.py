"""One step on its way through the model: counts its preemption points and stops at them.

`Stage.stint` is the step whose code runs now. Wrapped operators find it with one read; with none (warm-up, profiling) they do
nothing more. A step that stops takes its globals along and gives up the `Exclusive`, so that others may run vLLM's code.
"""

from __future__ import annotations

from collections.abc import Callable

from flowprefill.engines.protocol import Gate
from flowprefill.engines.vllm_engine import contexts
from flowprefill.engines.vllm_engine.exclusive import Exclusive
from flowprefill.engines.vllm_engine.tiles import TileLimits
from flowprefill.engines.window import LaunchWindow
from flowprefill.scheduling.actions import Granularity


class Stage:
    """What the steps of one worker share. `stint` is written by the holder of `exclusive` alone."""

    __slots__ = ("exclusive", "housekeeping", "limits", "stint")

    def __init__(self) -> None:
        self.exclusive = Exclusive()
        self.stint: Stint | None = None
        self.limits: TileLimits | None = None
        """Above which operators are cut into tiles; None leaves them whole."""
        self.housekeeping: Callable[[], None] | None = None
        """Called at every point; cheap when there is nothing to do (a KV connector's leases)."""


class Stint:
    """A step that runs; entered by its thread for as long as it is inside vLLM's code."""

    __slots__ = ("_gate", "_stage", "_window", "granularity", "index", "num_meetings")

    def __init__(
        self, stage: Stage, gate: Gate, granularity: Granularity, window: LaunchWindow | None = None
    ) -> None:
        """`window` bounds how far launches run ahead of a GPU; None where a call has ended when it returns."""
        self._stage = stage
        self._gate = gate
        self._window = window
        self.granularity = granularity
        self.index = 0
        self.num_meetings = 0
        """Points so far that lay behind a collective of all ranks."""

    def __enter__(self) -> None:
        self._stage.exclusive.acquire()
        self._stage.stint = self

    def __exit__(self, *exc: object) -> None:
        self._stage.stint = None
        self._stage.exclusive.release()

    def point(self, meets: bool = False) -> None:
        """A preemption point: three attribute reads unless somebody wants something.

        `meets` says that the ranks of a split model were in a collective since the point before.
        """
        index = self.index
        self.index = index + 1
        self.num_meetings += meets
        gate, stage = self._gate, self._stage
        gate.index = index
        if stage.housekeeping is not None:
            stage.housekeeping()
        if self._window is not None:
            self._window.advance(gate)
        if gate.raised or stage.exclusive.wanted:
            self._stop(index)

    def _stop(self, index: int) -> None:
        """Pause if the gate says so, and let others into vLLM's code. Raises `TaskUnwound` with everything put back."""
        stage = self._stage
        context = contexts.take()
        stage.stint = None
        stage.exclusive.release()
        try:
            if self._gate.raised:
                self._gate.pause(index)
        finally:
            stage.exclusive.acquire()
            stage.stint = self
            contexts.put(context)
