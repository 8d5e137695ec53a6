"""Cutting a layer's arguments into rows."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402 - what follows needs torch

from torch import nn

from flowprefill.engines.torch_engine.instrument import rows_of

pytestmark = pytest.mark.torch


def test_what_has_a_row_per_token_is_cut_and_the_rest_is_left() -> None:
    hidden, angles, mask = torch.randn(1, 10, 4), torch.randn(1, 10, 2), torch.randn(3)
    cut = rows_of((hidden, (angles, angles), mask, None, True), 2, 5, 10)
    assert torch.equal(cut[0], hidden[:, 2:5])
    assert torch.equal(cut[1][0], angles[:, 2:5])
    assert cut[2:] == (mask, None, True)


def test_cut_rows_have_the_strides_of_a_whole_tensor() -> None:
    """Else torch runs a linear operator on them as a batched product: seen here as another operator."""
    linear = nn.Linear(4, 4, bias=False)
    cut = rows_of(torch.randn(1, 10, 4), 2, 5, 10)
    assert cut.stride() == torch.empty(1, 3, 4).stride()
    with torch.profiler.profile() as profile:
        linear(cut)
    names = {event.name for event in profile.events()}
    assert "aten::mm" in names
    assert "aten::bmm" not in names
