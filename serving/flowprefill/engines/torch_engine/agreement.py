"""Checks at load time that a model run in tiles over paged keys and values says what transformers says.

Layers may do what the engine does not know of: positions added inside attention, state across tokens. Such a model must be
refused, not served wrongly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flowprefill.engines.torch_engine.attention import NAME
from flowprefill.engines.torch_engine.calibrate import TimingGate, dummy_item
from flowprefill.engines.torch_engine.layout import Tiles
from flowprefill.errors import ModelNotLoadable

if TYPE_CHECKING:
    from flowprefill.engines.torch_engine.engine import TorchEngine

NUM_TOKENS = 24
TOLERANCE = 0.25
"""Of the logits' norm: far above rounding in any type, far below what a wrong mask or position does."""


def check_agreement(engine: TorchEngine) -> None:
    """Raises ModelNotLoadable when a tiled run and a plain transformers forward disagree."""
    model = engine.model
    count = min(NUM_TOKENS, engine.spec.max_model_len, engine.spec.num_kv_blocks * engine.spec.block_size)
    item = dummy_item(engine, count)
    tiles, engine.tiles = engine.tiles, Tiles(rows=7, attention_pairs=64, expert_rows=4)
    try:
        ours = engine.forward(engine.plan_prefill([item], "operator"), TimingGate())
    finally:
        engine.tiles = tiles
    model.config._attn_implementation = "sdpa" if model._supports_sdpa else "eager"
    model.config._experts_implementation = "eager"
    try:
        with engine.thread_context():
            ids = torch.tensor([item.token_ids], device=model.device)
            plain = model(input_ids=ids, use_cache=False).logits[0, -1:]
    finally:
        model.config._attn_implementation = NAME
        model.config._experts_implementation = NAME
    assert ours is not None, "the item asks for a token"
    difference = float((ours - plain).float().norm() / plain.float().norm())
    if not difference <= TOLERANCE:
        raise ModelNotLoadable(
            f"{type(model).__name__} gives logits that differ by {difference:.2f} of their norm from transformers' own; "
            f"accepted is {TOLERANCE}: its layers do something that this engine does not support"
        )
