"""What runs inside each decoder layer, in order: learnt once from a tiny forward, for any model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OpKind = Literal["linear", "attention", "experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One core operator. `flops_per_row` excludes attention's key-dependent part.

    `num_experts` and `top_k` are 0 unless `kind` is experts; `window` is attention's sliding window.
    `reduces` says that tensor parallelism ends it in a collective.
    """

    kind: OpKind
    flops_per_row: int = 0
    window: int | None = None
    num_experts: int = 0
    top_k: int = 0
    reduces: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTrace:
    """The operators of one decoder layer, in the order they run."""

    ops: tuple[Op, ...]

    @property
    def window(self) -> int | None:
        return next(op.window for op in self.ops if op.kind == "attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTrace:
    """Layers in order, and the linear operators after the last one (the language model head)."""

    layers: tuple[LayerTrace, ...]
    tail: tuple[Op, ...]
    num_kv_heads: int
    group_size: int
    head_dim: int
