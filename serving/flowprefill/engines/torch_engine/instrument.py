"""Puts preemption points and row tiles into a loaded model by wrapping `forward` on its instances.

No class is changed and no hook is registered: an instance attribute costs a tenth of a forward hook.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowprefill.engines.torch_engine.run_state import Runtime


def instrument(layers: Sequence[nn.Module], linears: Sequence[nn.Linear], runtime: Runtime) -> None:
    """Wrap these linear operators and decoder layers."""
    for linear in linears:
        _wrap_linear(linear, runtime)
    for index, layer in enumerate(layers):
        _wrap_layer(layer, runtime, index, is_last=index == len(layers) - 1)


def _wrap_linear(module: nn.Linear, runtime: Runtime) -> None:
    forward = module.forward

    def forward_with_points(input: Tensor) -> Tensor:
        run = runtime.active
        if run is None or not run.fine:
            return forward(input)
        run.point()
        output = forward(input)
        run.point()
        return output

    module.forward = forward_with_points  # type: ignore[method-assign]


def _wrap_layer(layer: nn.Module, runtime: Runtime, index: int, *, is_last: bool) -> None:
    forward = layer.forward

    # Any: each model passes its own further arguments and returns a tensor or a tuple that starts with one.
    def forward_in_tiles(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        run = runtime.active
        if run is None:
            return forward(hidden_states, *args, **kwargs)
        tiles = run.layer_tiles()
        if len(tiles) == 1:
            run.start_tile(index, 0)
            output = forward(hidden_states, *args, **kwargs)
        else:
            total = hidden_states.shape[1]
            parts: list[Any] = []
            for number, tile in enumerate(tiles):
                run.start_tile(index, number)
                parts.append(
                    forward(
                        hidden_states[:, tile.start : tile.end],
                        *(rows_of(value, tile.start, tile.end, total) for value in args),
                        **{
                            name: rows_of(value, tile.start, tile.end, total)
                            for name, value in kwargs.items()
                        },
                    )
                )
            output = _join(parts)
        if is_last and (rows := run.sampled_rows()) is not None:
            # What follows (final norm, language model head) works row by row: only sampled rows need it.
            if isinstance(output, tuple):
                return (output[0][:, rows], *output[1:])
            return output[:, rows]
        return output

    layer.forward = forward_in_tiles


def rows_of(value: Any, start: int, end: int, total: int) -> Any:
    """Rows `[start, end)` of an argument that has a row per token along axis 1; anything else as it is."""
    if isinstance(value, Tensor):
        return value[:, start:end] if value.dim() >= 2 and value.shape[1] == total else value
    if isinstance(value, tuple):
        return tuple(rows_of(part, start, end, total) for part in value)
    return value


def _join(parts: list[Any]) -> Any:
    if isinstance(parts[0], tuple):
        return (torch.cat([part[0] for part in parts], dim=1), *parts[0][1:])
    return torch.cat(parts, dim=1)
