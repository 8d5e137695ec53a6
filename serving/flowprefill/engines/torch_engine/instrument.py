"""Puts preemption points and row tiles into a loaded model by wrapping `forward` on its instances.

No class is changed and no hook is registered: an instance attribute costs a tenth of a forward hook.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowprefill.engines.torch_engine.layout import head_pieces
from flowprefill.engines.torch_engine.run_state import Runtime


def instrument(
    layers: Sequence[nn.Module],
    linears: Sequence[nn.Linear],
    runtime: Runtime,
    *,
    heads: Sequence[nn.Linear] = (),
) -> None:
    """Wrap these decoder layers, the linear operators inside them and those after the last one."""
    for linear in linears:
        _wrap_linear(linear, runtime)
    for head in heads:
        _wrap_head(head, runtime)
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


def _wrap_head(module: nn.Linear, runtime: Runtime) -> None:
    forward = module.forward

    def forward_in_pieces(input: Tensor) -> Tensor:
        run = runtime.active
        if run is None or not run.fine:
            return forward(input)
        parts = []
        for first, last in head_pieces(input.shape[-2], run.head_rows):
            run.point()
            parts.append(forward(_cut(input, first, last)))
            run.point()
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)

    module.forward = forward_in_pieces  # type: ignore[method-assign]


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
            output = None
            for number, tile in enumerate(tiles):
                run.start_tile(index, number)
                part = forward(
                    _cut(hidden_states, tile.start, tile.end),
                    *(rows_of(value, tile.start, tile.end, total) for value in args),
                    **{name: rows_of(value, tile.start, tile.end, total) for name, value in kwargs.items()},
                )
                output = _put_rows(output, part, tile.start, total)
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
        return _cut(value, start, end) if value.dim() >= 2 and value.shape[1] == total else value
    if isinstance(value, tuple):
        return tuple(rows_of(part, start, end, total) for part in value)
    return value


def _cut(tensor: Tensor, start: int, end: int) -> Tensor:
    """Rows `[start, end)` of axis 1.

    A packed batch is one sequence. Its rows are cut so that the result has the strides of a whole tensor: with those of a plain
    slice torch runs a linear operator as a batched product, which is eight times slower on a CPU.
    """
    return tensor[0, start:end].unsqueeze(0) if tensor.shape[0] == 1 else tensor[:, start:end]


def _put_rows(output: Any, part: Any, start: int, total: int) -> Any:
    """Put a tile's output into the whole, tile by tile: one copy at the end would be one long gap between points."""
    if isinstance(part, tuple):
        whole = None if output is None else output[0]
        return (_put_rows(whole, part[0], start, total), *part[1:])
    if output is None:
        output = torch.empty((part.shape[0], total, *part.shape[2:]), dtype=part.dtype, device=part.device)
    output[:, start : start + part.shape[1]] = part
    return output
