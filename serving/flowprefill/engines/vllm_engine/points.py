"""Finds a model's preemption points by the types of its modules, and wraps them.

Any decoder of vLLM works: points lie after each linear operator, attention layer and mixture of experts (the outermost of
nested ones). `forward` is replaced on the instance: no class is touched, and a call costs a sixth of a forward hook's. In a model
that torch.compile traces, a point is an operator of torch (`compiled_point.py`), and rows are not cut: the graph is one for all lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import LinearBase

from flowprefill.engines.vllm_engine import compiled_point
from flowprefill.engines.vllm_engine.collectives import has_collective
from flowprefill.engines.vllm_engine.stint import Stage
from flowprefill.engines.vllm_engine.tiled_attention import attend_in_tiles
from flowprefill.engines.vllm_engine.tiled_rows import in_row_tiles, num_rows
from flowprefill.engines.vllm_engine.tiles import TileLimits, attention_tiles, row_tiles
from flowprefill.errors import InvalidConfiguration
from flowprefill.scheduling.actions import Granularity

OPERATORS = (LinearBase, AttentionLayerBase, MoERunner)


def operators(model: nn.Module) -> list[nn.Module]:
    """The modules after which a forward may pause, in the order in which the model lists them."""
    found: list[nn.Module] = []
    names: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, OPERATORS) and not _within(name, names):
            names.append(name)
            found.append(module)
    return found


def layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers: the numbered modules of the outermost lists that hold an operator."""
    found: list[nn.Module] = []
    names: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or _within(name, names):
            continue
        children = [child for child in module if any(isinstance(m, OPERATORS) for m in child.modules())]
        if children:
            names.append(name)
            found += children
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PointCounts:
    """Points of one forward whose operators are whole. `cuts_rows` says whether long ones are cut by token rows."""

    operators: int
    attentions: int
    layers: int
    cuts_rows: bool

    def whole(self, granularity: Granularity) -> int:
        """Points of a forward without tiles."""
        return self.operators if granularity == "operator" else self.layers

    def of(
        self, batch: Sequence[tuple[int, int]], granularity: Granularity, limits: TileLimits | None
    ) -> int:
        """Points of a forward over requests of (new tokens, tokens in all)."""
        if granularity != "operator" or limits is None:
            return self.whole(granularity)
        num_rows = sum(num_new for num_new, _ in batch)
        by_rows = len(row_tiles(num_rows, limits)) if self.cuts_rows else 1
        return (self.operators - self.attentions) * by_rows + self.attentions * len(
            attention_tiles(batch, limits)
        )


def instrument(model: nn.Module, stage: Stage, *, compiled: bool) -> PointCounts:
    """Put points into the model; how many there are. `compiled` says that torch.compile will trace it.

    Raises InvalidConfiguration for a model without any.
    """
    fine, coarse = operators(model), layers(model)
    if not fine:
        raise InvalidConfiguration(
            f"{type(model).__name__} has no place to pause at; accepted are decoders built of vLLM's linear, attention and "
            "mixture-of-experts layers"
        )
    wrap = _wrap_traced if compiled else _wrap
    for module in coarse:
        wrap(module, stage, "layer")
    for module in fine:
        wrap(module, stage, "operator")
    attend_in_tiles(model, stage)
    return PointCounts(
        operators=len(fine),
        attentions=sum(isinstance(module, AttentionLayerBase) for module in fine),
        layers=max(len(coarse), 1),
        cuts_rows=not compiled,
    )


def _wrap(module: nn.Module, stage: Stage, granularity: Granularity) -> None:
    forward, meets = module.forward, has_collective(module)
    by_rows = granularity == "operator" and not isinstance(module, AttentionLayerBase)

    def forward_then_point(*args: Any, **kwargs: Any) -> Any:
        stint = stage.stint
        if stint is None or stint.granularity != granularity:
            return forward(*args, **kwargs)
        limits = stage.limits
        if by_rows and limits is not None and num_rows(args, kwargs) > limits.rows:
            output = in_row_tiles(forward, args, kwargs, limits, lambda: stint.point(meets))
        else:
            output = forward(*args, **kwargs)
        stint.point(meets)
        return output

    module.forward = forward_then_point


def _wrap_traced(module: nn.Module, stage: Stage, granularity: Granularity) -> None:
    forward, meets = module.forward, has_collective(module)
    fine = granularity == "operator"
    compiled_point.use(stage)

    def forward_then_point(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        torch.ops.flowprefill.point(output[0] if isinstance(output, tuple) else output, fine, meets)
        return output

    module.forward = forward_then_point


def _within(name: str, outer: Sequence[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in outer)
