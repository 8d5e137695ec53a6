"""Attention of some rows over contiguous keys and values, from blocks that need no mask tensor.

    H query heads, KH key-value heads, G = H / KH, hd head width, R rows, L keys, W sliding window

Rows at positions `[past, past + R)` see a causal block on the diagonal, their own keys, and an unmasked block of everything
before. A sliding window adds a masked block at its far edge. Blocks are merged by the log-sum-exp of their scores. Keys of a
group of heads are a stride-0 view, never a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

SPLIT_ROWS = 128
"""From this many rows on, each key-value head is a call of its own."""


def attend(
    out: Tensor, query: Tensor, keys: Tensor, values: Tensor, *, past: int, scale: float, window: int | None
) -> None:
    """query [H, R, hd] at positions `[past, past + R)` over keys and values [KH, past + R, hd], into `out` [R, H, hd]."""
    heads, rows, _ = query.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    if rows >= SPLIT_ROWS and group > 1 and kv_heads > 1:
        # The kernel writes the heads of a call side by side, as `out` wants them; with a dimension for the groups it
        # would not, and many rows would be copied twice.
        for head in range(kv_heads):
            mine = slice(head * group, (head + 1) * group)
            one = slice(head, head + 1)
            attend(out[:, mine], query[mine], keys[one], values[one], past=past, scale=scale, window=window)
        return
    if window is None or past + rows <= window:
        parts = _causal(query, keys, values, past, scale)
    elif rows == 1:
        parts = _causal(query, keys[:, -window:], values[:, -window:], min(past, window - 1), scale)
    elif rows < window <= past + 1:
        parts = _windowed(query, keys, values, past, scale, window)
    else:
        parts = _masked(query, keys, values, past, scale, window)
    _store(out, parts)


Part = tuple[Tensor, Tensor]
"""Attention over one block [KH, G, R, hd] and the log-sum-exp of its scores [KH, G, R] (float32)."""


def _store(out: Tensor, parts: list[Part]) -> None:
    """Merge the parts into `out` [R, H, hd]."""
    one, one_lse = parts[0]
    kv_heads, group, rows, width = one.shape
    place = out.view(rows, kv_heads, group, width)
    if len(parts) == 1:
        place.copy_(one.permute(2, 0, 1, 3))
        return
    for other, other_lse in parts[1:-1]:
        one, one_lse = merge(one, one_lse, other, other_lse), torch.logaddexp(one_lse, other_lse)
    other, other_lse = parts[-1]
    weight = _weight(one_lse, other_lse, one.dtype)
    torch.lerp(
        one.permute(2, 0, 1, 3), other.permute(2, 0, 1, 3), weight.permute(2, 0, 1).unsqueeze(-1), out=place
    )


def _causal(query: Tensor, keys: Tensor, values: Tensor, past: int, scale: float) -> list[Part]:
    heads, rows, width = query.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    if rows == 1:
        # A decode row: the group's heads are the rows of one small unmasked call.
        folded = query.reshape(1, kv_heads, group, width)
        part, lse = attend_block(folded, keys.unsqueeze(0), values.unsqueeze(0), scale)
        return [(part.view(kv_heads, group, 1, width), lse.view(kv_heads, group, 1))]
    grouped = query.view(kv_heads, group, rows, width)
    own = _block(grouped, keys[:, past:], values[:, past:], scale, causal=True)
    return [own, _block(grouped, keys[:, :past], values[:, :past], scale)] if past else [own]


def _windowed(
    query: Tensor, keys: Tensor, values: Tensor, past: int, scale: float, window: int
) -> list[Part]:
    """The window's three blocks: its far edge, of which each row sees one key less, its middle, and the diagonal."""
    heads, rows, width = query.shape
    kv_heads = keys.shape[0]
    grouped = query.view(kv_heads, heads // kv_heads, rows, width)
    first = past - window + 1
    edge = torch.full((rows, rows), float("-inf"), dtype=query.dtype, device=query.device).tril_(-1)
    parts = [
        _block(grouped, keys[:, past:], values[:, past:], scale, causal=True),
        _block(grouped, keys[:, first : first + rows], values[:, first : first + rows], scale, mask=edge),
    ]
    if first + rows < past:
        parts.append(_block(grouped, keys[:, first + rows : past], values[:, first + rows : past], scale))
    return parts


def _masked(query: Tensor, keys: Tensor, values: Tensor, past: int, scale: float, window: int) -> list[Part]:
    """One masked block over all keys in reach: windows that are short, or that only some rows have filled."""
    heads, rows, width = query.shape
    kv_heads = keys.shape[0]
    grouped = query.view(kv_heads, heads // kv_heads, rows, width)
    first = max(0, past - window + 1)
    positions = torch.arange(past, past + rows, device=query.device).unsqueeze(1)
    reach = torch.arange(first, past + rows, device=query.device).unsqueeze(0)
    hidden = (reach > positions) | (reach <= positions - window)  # [R, L]
    mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
    mask.masked_fill_(hidden, float("-inf"))
    return [_block(grouped, keys[:, first:], values[:, first:], scale, mask=mask)]


def _block(
    grouped: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> Part:
    """`attend_block` with keys and values [KH, L, hd] seen as [KH, G, L, hd]."""
    group = grouped.shape[1]
    keys = keys.unsqueeze(1).expand(-1, group, -1, -1)
    values = values.unsqueeze(1).expand(-1, group, -1, -1)
    return attend_block(grouped, keys, values, scale, causal=causal, mask=mask)


def attend_block(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> Part:
    """Attention [B, h, R, hd] over one block of keys, and the log-sum-exp of its scores [B, h, R] (float32).

    `mask` [R, L] is added to the scores; each row must see at least one key.
    """
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, causal, attn_mask=mask, scale=scale
        )
        return out, lse
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.device.type == "cuda" and half and mask is None and query.shape[-1] % 8 == 0:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            query, keys, values, 0.0, causal, scale=scale
        )[:2]
        return out, lse
    return attend_block_by_parts(query, keys, values, scale, causal=causal, mask=mask)


def attend_block_by_parts(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> Part:
    """As `attend_block`, from plain operators: devices and types without a fused kernel that tells its log-sum-exp."""
    scores = torch.matmul(query, keys.transpose(-1, -2)).float() * scale
    if mask is not None:
        scores += mask
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(hidden, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    return torch.matmul(torch.exp(scores - lse.unsqueeze(-1)).to(values.dtype), values), lse


def merge(one: Tensor, one_lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Attention over the union of two disjoint sets of keys, from the attention over each."""
    return torch.lerp(one, other, _weight(one_lse, other_lse, one.dtype).unsqueeze(-1))


def _weight(one_lse: Tensor, other_lse: Tensor, dtype: torch.dtype) -> Tensor:
    """`other`'s share of the summed exponentials: exp(b) / (exp(a) + exp(b)), a sigmoid."""
    return torch.sigmoid(other_lse - one_lse).to(dtype)
