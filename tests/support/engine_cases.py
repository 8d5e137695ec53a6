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


CASES = (
    EngineCase(name="simulated", build=_simulated),
    EngineCase(name="simulated-tiled", build=_simulated_tiled),
)
