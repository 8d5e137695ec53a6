"""One task inside the model: where it stands, its own activations and attention metadata.

Exactly one thread advances inside an engine. `Runtime.active` is the state of the task that does; the task's own
thread puts it there when it starts and each time a pause returns, so wrapped operators find it with one read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from flowprefill.engines.protocol import Gate
from flowprefill.engines.torch_engine.attention import attend_tile
from flowprefill.engines.torch_engine.experts import run_groups
from flowprefill.engines.torch_engine.kv import PagedKV, Places
from flowprefill.engines.torch_engine.layout import Tile
from flowprefill.engines.torch_engine.plan import TorchPlan
from flowprefill.engines.window import LaunchWindow

if TYPE_CHECKING:
    from torch import nn


class Run(Protocol):
    """What wrapped modules and registered functions ask of whatever runs: a task, or the tracer at load time."""

    fine: bool

    @property
    def head_rows(self) -> int | None: ...

    def point(self) -> None: ...
    def layer_tiles(self) -> tuple[Tile, ...]: ...
    def start_tile(self, layer: int, tile: int) -> None: ...
    def sampled_rows(self) -> Tensor | None: ...
    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor: ...
    def run_experts(
        self, module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor: ...


class Runtime:
    """What an engine's instrumented modules share. Written only by the thread that advances."""

    __slots__ = ("active", "kv")

    def __init__(self) -> None:
        self.active: Run | None = None
        self.kv: PagedKV | None = None


class RunState:
    """A task's run through the model. Implements `Run`."""

    def __init__(
        self,
        *,
        runtime: Runtime,
        kv: PagedKV,
        plan: TorchPlan,
        gate: Gate,
        places: tuple[Places, ...],
        block_tables: list[Tensor],
        sampled: Tensor | None,
        window: LaunchWindow | None,
    ) -> None:
        self.runtime = runtime
        self.kv = kv
        self.plan = plan
        self.gate = gate
        self.fine = plan.granularity == "operator"
        self.index = 0
        self.tile = 0
        self.places = places  # per tile: where its keys and values go in a layer's pool
        self.block_tables = block_tables  # per item [N], blocks in order
        self.sampled = sampled  # [S] packed rows whose logits are wanted, or None for all
        self.scratch: dict[int, tuple[Tensor, Tensor]] = {}
        """Per item that spans tiles: keys and values `[KH, L, hd]` of the layer in progress."""
        self.head_rows = plan.limits.head_rows
        self._window = window
        self._tiles = plan.tiles

    def point(self) -> None:
        """A preemption point: one attribute read unless a pause is asked for."""
        index = self.index
        self.index = index + 1
        gate = self.gate
        gate.index = index
        if self._window is not None:
            self._window.advance(gate)
        if gate.raised:
            gate.pause(index)
            self.runtime.active = self

    def layer_tiles(self) -> tuple[Tile, ...]:
        return self._tiles

    def start_tile(self, layer: int, tile: int) -> None:
        self.tile = tile
        if self.fine or tile == 0:
            self.point()

    def sampled_rows(self) -> Tensor | None:
        return self.sampled

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        return attend_tile(self, module.layer_idx, query, key, value, scaling, window)  # type: ignore[arg-type]

    def run_experts(self, module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return run_groups(self, module, hidden, top_k_index, top_k_weights)
