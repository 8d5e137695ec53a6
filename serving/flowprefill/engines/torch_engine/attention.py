"""Causal attention over paged keys and values, one packed tile at a time, with points between its pieces.

H query heads, KH key-value heads, G = H / KH, hd head width, R rows of the tile, L keys

"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flowprefill.engines.torch_engine.attention_blocks import attend
from flowprefill.engines.torch_engine.layout import Segment, Unit

if TYPE_CHECKING:
    from flowprefill.engines.torch_engine.run_state import RunState

NAME = "flowprefill"
"""Under which attention and experts functions are registered with transformers."""

UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sinks")
"""Arguments by which models ask for another kind of attention; none may be given."""


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers' AttentionInterface.

    query [1, H, R, hd], key and value [1, KH, R, hd], after rotary embedding; returns [1, R, H, hd].
    """
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with `{name}` is not supported by the torch engine")
    if attention_mask is not None:
        raise NotImplementedError(
            "attention with a mask of the model's own is not supported by the torch engine"
        )
    runtime: Any = module.flowprefill_runtime  # set on every module when the model is attached
    run = runtime.active
    assert run is not None, "model code runs only inside an engine's run"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out: Tensor = run.attend(module, query, key, value, scale, sliding_window)
    return out, None


def attend_tile(
    run: RunState, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """Attention of the current tile: writes its keys and values into the pool, then attends unit by unit."""
    if run.fine:
        run.point()
    tile = run.plan.tiles[run.tile]
    query, key, value = query[0], key[0], value[0]  # [H, R, hd], [KH, R, hd]
    run.kv.write(layer, run.places[run.tile], key, value)
    units_of = run.plan.units[window][run.tile]
    if len(units_of) == 1 and len(units_of[0]) == 1:
        whole = _attend_fresh(query, key, value, tile.segments[0], scale, window)
        if whole is not None:
            if run.fine:
                run.point()
            return whole
    out = torch.empty(
        (1, query.shape[1], query.shape[0], value.shape[-1]), dtype=query.dtype, device=query.device
    )
    for segment, units in zip(tile.segments, units_of, strict=True):
        keys, values = _keys_values(run, layer, segment, key, value)
        for unit in units:
            _attend_unit(out[0], query, keys, values, segment, unit, scale, window)
            if run.fine:
                run.point()
    return out


def _attend_fresh(
    query: Tensor, key: Tensor, value: Tensor, segment: Segment, scale: float, window: int | None
) -> Tensor | None:
    """The commonest case in one call: a tile that is one whole prompt; None when it is not. Returns [1, R, H, hd]."""
    rows = query.shape[1]
    if segment.position or segment.spans_tiles or (window is not None and rows > window):
        return None
    # Exactly the call that transformers makes, so that an uncut prompt has its very bits.
    out = torch.nn.functional.scaled_dot_product_attention(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        is_causal=rows > 1,
        scale=scale,
        enable_gqa=query.shape[0] != key.shape[0],
    )
    return out.transpose(1, 2)


def _keys_values(
    run: RunState, layer: int, segment: Segment, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values of positions `[0, end of segment)`, each [KH, L, hd].

    An item inside one tile needs no more than the pool. One that spans tiles gets a contiguous copy of the layer in
    progress, to which each tile adds its own, so that a long prefix is gathered once per layer and not once per tile.
    """
    rows = slice(segment.row0, segment.row1)
    if segment.position == 0 and not segment.spans_tiles:
        return key[:, rows], value[:, rows]
    end = segment.position + segment.num_rows
    shape = run.plan.shapes[segment.item]
    if not segment.spans_tiles:
        size = run.kv.block_size
        keys, values = run.kv.gather(layer, run.block_tables[segment.item][: -(-end // size)])
        return keys[:, :end], values[:, :end]
    pair = run.scratch.get(segment.item)
    if pair is None:
        length = shape.start + shape.num_rows
        pair = run.scratch[segment.item] = (
            torch.empty((key.shape[0], length, key.shape[2]), dtype=key.dtype, device=key.device),
            torch.empty((value.shape[0], length, value.shape[2]), dtype=value.dtype, device=value.device),
        )
    keys, values = pair
    if segment.position == shape.start and shape.start:
        size = run.kv.block_size
        past_keys, past_values = run.kv.gather(
            layer, run.block_tables[segment.item][: -(-shape.start // size)]
        )
        keys[:, : shape.start] = past_keys[:, : shape.start]
        values[:, : shape.start] = past_values[:, : shape.start]
    keys[:, segment.position : end] = key[:, rows]
    values[:, segment.position : end] = value[:, rows]
    return keys[:, :end], values[:, :end]


def _attend_unit(
    out: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    segment: Segment,
    unit: Unit,
    scale: float,
    window: int | None,
) -> None:
    """Attend one unit into its place of `out` [R, H, hd]."""
    group = query.shape[0] // keys.shape[0]
    heads = slice(unit.head0 * group, unit.head1 * group)
    rows = slice(segment.row0 + unit.row0, segment.row0 + unit.row1)
    past, end = segment.position + unit.row0, segment.position + unit.row1
    kv = slice(unit.head0, unit.head1)
    attend(
        out[rows, heads],
        query[heads, rows],
        keys[kv, :end],
        values[kv, :end],
        past=past,
        scale=scale,
        window=window,
    )
