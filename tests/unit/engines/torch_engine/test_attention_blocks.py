"""Merged blocks against one masked softmax over everything, in float64."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402 - what follows needs torch

from flowprefill.engines.torch_engine.attention_blocks import (
    attend,
    attend_block,
    attend_block_by_parts,
    merge,
)

pytestmark = pytest.mark.torch

SCALE = 0.3


def reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, past: int, window: int | None
) -> torch.Tensor:
    """[R, H, hd] by the definition."""
    heads, rows, _ = query.shape
    group = heads // keys.shape[0]
    keys, values = keys.double().repeat_interleave(group, 0), values.double().repeat_interleave(group, 0)
    scores = query.double() @ keys.transpose(1, 2) * SCALE
    for row in range(rows):
        for key in range(keys.shape[1]):
            position = past + row
            if key > position or (window is not None and key <= position - window):
                scores[:, row, key] = float("-inf")
    return (torch.softmax(scores, -1) @ values).transpose(0, 1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize(
    ("past", "rows", "window"),
    [
        (0, 1, None),
        (0, 9, None),
        (30, 1, None),
        (30, 9, None),
        (5, 130, None),  # many rows: a call for each key-value head
        (0, 20, 6),  # no row's window is filled before the tile
        (4, 20, 6),
        (30, 5, 6),  # edge and diagonal only
        (30, 4, 12),  # edge, middle and diagonal
        (30, 6, 6),
        (30, 1, 6),
        (7, 4, 12),  # just filled
        (150, 140, 145),
        (3, 4, 100),  # wider than everything
    ],
)
def test_blocks_give_what_the_definition_gives(
    heads: int, kv_heads: int, past: int, rows: int, window: int | None
) -> None:
    torch.manual_seed(past + rows)
    query = torch.randn(heads, rows, 8)
    keys, values = torch.randn(kv_heads, past + rows, 8), torch.randn(kv_heads, past + rows, 8)
    out = torch.empty(rows, heads, 8)
    attend(out, query, keys, values, past=past, scale=SCALE, window=window)
    expected = reference(query, keys, values, past, window)
    assert float((out.double() - expected).abs().max()) < 1e-5  # float32 has 7 digits


@pytest.mark.parametrize("causal", [False, True])
def test_the_fused_kernel_and_plain_operators_agree(causal: bool) -> None:
    torch.manual_seed(0)
    query, keys, values = (torch.randn(2, 3, 7, 8) for _ in range(3))
    for ours, theirs in zip(
        attend_block(query, keys, values, SCALE, causal=causal),
        attend_block_by_parts(query, keys, values, SCALE, causal=causal),
        strict=True,
    ):
        assert ours.shape == theirs.shape
        assert float((ours - theirs).abs().max()) < 1e-5
    mask = torch.zeros(7, 7).masked_fill_(torch.ones(7, 7).tril(-1).bool(), float("-inf"))
    masked = [f(query, keys, values, SCALE, mask=mask)[0] for f in (attend_block, attend_block_by_parts)]
    assert float((masked[0] - masked[1]).abs().max()) < 1e-5


def test_merging_halves_gives_the_whole_even_when_one_half_is_nothing_to_the_other() -> None:
    torch.manual_seed(0)
    query, keys, values = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 10, 8), torch.randn(1, 2, 10, 8)
    keys[:, :, 6:] *= 200  # scores in the hundreds: exponentials alone would overflow
    whole, _ = attend_block_by_parts(query, keys, values, SCALE)
    first = attend_block_by_parts(query, keys[:, :, :6], values[:, :, :6], SCALE)
    second = attend_block_by_parts(query, keys[:, :, 6:], values[:, :, 6:], SCALE)
    assert float((merge(*first, *second) - whole).abs().max()) < 1e-5
