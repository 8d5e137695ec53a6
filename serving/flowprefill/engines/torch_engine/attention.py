"""Causal attention over paged keys and values, one packed tile at a time, with points between its pieces.

    H query heads, KH key-value heads, G = H / KH, hd head width, R rows of the tile, L keys

A piece is a causal block on the diagonal (the rows' own keys) and an unmasked block of everything before, merged by
their log-sum-exp: neither needs a mask tensor. Grouped heads are a stride-0 view of the keys, never a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

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
        segment = tile.segments[0]
        keys, values = _keys_values(run, layer, segment, key, value)
        out = _attend(query, keys, values, segment.position, scale, window)
        if run.fine:
            run.point()
        return out.unsqueeze(0)
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
    end = segment.position + unit.row1
    kv = slice(unit.head0, unit.head1)
    out[rows, heads] = _attend(
        query[heads, rows], keys[kv, :end], values[kv, :end], segment.position + unit.row0, scale, window
    )


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, past: int, scale: float, window: int | None
) -> Tensor:
    """query [H, R, hd] at positions `[past, past + R)` over keys and values [KH, past + R, hd]; returns [R, H, hd]."""
    heads, rows, width = query.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    if window is not None and past + rows > window:
        return _attend_window(query, keys, values, past, scale, window)
    if rows == 1:
        # A decode row: the group's heads are the rows of one small unmasked call.
        folded = query.view(1, kv_heads, group, width)
        out, _ = attend_block(folded, keys.unsqueeze(0), values.unsqueeze(0), scale, causal=False)
        return out.reshape(1, heads, width)
    grouped = query.view(kv_heads, group, rows, width)
    out, lse = attend_block(
        grouped, _expand(keys[:, past:], group), _expand(values[:, past:], group), scale, causal=True
    )
    if past:
        before, before_lse = attend_block(
            grouped, _expand(keys[:, :past], group), _expand(values[:, :past], group), scale, causal=False
        )
        out = merge(out, lse, before, before_lse)
    return out.permute(2, 0, 1, 3).reshape(rows, heads, width)


def _attend_window(
    query: Tensor, keys: Tensor, values: Tensor, past: int, scale: float, window: int
) -> Tensor:
    """As `_attend` when some row does not see every earlier key: one masked block over the keys in reach."""
    heads, rows, width = query.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    first = max(0, past - window + 1)
    positions = torch.arange(past, past + rows, device=query.device).unsqueeze(1)
    reach = torch.arange(first, past + rows, device=query.device).unsqueeze(0)
    hidden = (reach > positions) | (reach <= positions - window)  # [R, L]
    mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(
        hidden, float("-inf")
    )
    out = torch.nn.functional.scaled_dot_product_attention(
        query.view(kv_heads, group, rows, width),
        _expand(keys[:, first:], group),
        _expand(values[:, first:], group),
        attn_mask=mask,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).reshape(rows, heads, width)


def _expand(tensor: Tensor, group: int) -> Tensor:
    """[KH, L, hd] seen as [KH, G, L, hd]."""
    return tensor.unsqueeze(1).expand(-1, group, -1, -1)


def attend_block(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention [B, h, R, hd] over one block of keys, and the log-sum-exp of its scores [B, h, R] (float32)."""
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, causal, scale=scale
        )
        return out, lse
    if query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            query, keys, values, 0.0, causal, scale=scale
        )[:2]
        return out, lse
    return attend_block_by_parts(query, keys, values, scale, causal=causal)


def attend_block_by_parts(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """As `attend_block`, from plain operators: devices and types without a fused kernel that tells its log-sum-exp."""
    scores = torch.matmul(query, keys.transpose(-1, -2)).float() * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(hidden, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    return torch.matmul(torch.exp(scores - lse.unsqueeze(-1)).to(values.dtype), values), lse


def merge(one: Tensor, one_lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

    Each part's weight is its share of the summed exponentials: `other` weighs exp(b) / (exp(a) + exp(b)), a sigmoid.
    """
    weight = torch.sigmoid(other_lse - one_lse).to(one.dtype).unsqueeze(-1)
    return torch.lerp(one, other, weight)
