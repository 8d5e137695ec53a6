"""Operators that work row by row, run over tiles of token rows with a preemption point between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flowprefill.engines.vllm_engine.tiles import TileLimits, row_tiles


def num_rows(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Token rows of the first tensor that an operator is given; 0 when it gets none."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.shape[0]
    return 0


def in_row_tiles(
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    limits: TileLimits,
    between: Callable[[], None],
) -> Any:
    """The operator's output, put together tile by tile; `between` is called after each tile but the last."""
    total = num_rows(args, kwargs)
    tiles = row_tiles(total, limits)
    whole: Any = None
    for number, (start, end) in enumerate(tiles):
        part = forward(
            *(_cut(value, start, end, total) for value in args),
            **{name: _cut(value, start, end, total) for name, value in kwargs.items()},
        )
        whole = _put(whole, part, start, total)
        if number < len(tiles) - 1:
            between()
    return whole


def _cut(value: Any, start: int, end: int, total: int) -> Any:
    return value[start:end] if isinstance(value, torch.Tensor) and value.shape[:1] == (total,) else value


def _put(whole: Any, part: Any, start: int, total: int) -> Any:
    """A tile's rows into the whole output: a tensor, or a tuple whose first is one (a linear operator's, with its bias)."""
    if isinstance(part, tuple):
        first = None if whole is None else whole[0]
        return (_put(first, part[0], start, total), *part[1:])
    if whole is None:
        whole = part.new_empty((total, *part.shape[1:]))
    whole[start : start + part.shape[0]] = part
    return whole
