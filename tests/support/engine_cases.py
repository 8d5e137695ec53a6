"""Engines that the contract suite runs on. An engine joins by one entry in `CASES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from flowprefill.clock import MonotonicClock
from flowprefill.engines.protocol import Engine
from flowprefill.engines.simulated.engine import SimulatedEngine
from flowprefill.engines.simulated.presets import TINY


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCase:
    """An engine under contract. `build` loads a fresh one with at least 64 blocks and room for 200 tokens a prompt.

    Blocks hold 4 to 16 tokens. Greedy tokens must not depend on how a prompt was packed, cut or interrupted, so a
    model of floating-point numbers runs in a format in which its best token has no near tie.
    """

    name: str
    build: Callable[[], Engine]
    marks: tuple[pytest.MarkDecorator, ...] = ()


def _simulated() -> Engine:
    return SimulatedEngine(
        TINY.scaled(0.001), MonotonicClock(), num_kv_blocks=128, block_size=8, vocab_size=400
    )


def _simulated_tiled() -> Engine:
    return SimulatedEngine(
        TINY.scaled(0.001),
        MonotonicClock(),
        num_kv_blocks=128,
        block_size=8,
        vocab_size=400,
        max_gap_s=2e-7,
    )


def _torch(family: str, *, tiled: bool) -> Engine:
    pytest.importorskip("torch")
    from flowprefill.engines.torch_engine import TorchEngine
    from flowprefill.engines.torch_engine.layout import Tiles
    from support.tiny_models import tiny_model

    engine = TorchEngine.load(tiny_model(family), dtype="float32", kv_cache_tokens=1024, block_size=8)
    engine.tiles = Tiles(rows=32, attention_pairs=2_000, expert_rows=20) if tiled else Tiles()
    return engine


CASES = (
    EngineCase(name="simulated", build=_simulated),
    EngineCase(name="simulated-tiled", build=_simulated_tiled),
    EngineCase(name="torch", build=lambda: _torch("llama", tiled=False), marks=(pytest.mark.torch,)),
    EngineCase(
        name="torch-tiled-moe", build=lambda: _torch("qwen3_moe", tiled=True), marks=(pytest.mark.torch,)
    ),
)
