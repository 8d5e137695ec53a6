"""What the engine core of a vLLM pod would tell its parent: values to build messages of."""

from __future__ import annotations

import datetime
from typing import Any

from flowprefill.engines.protocol import EngineSpec
from flowprefill.scheduling.profile import Profile, ProfileSample, Provenance
from flowprefill.scheduling.snapshot import Counters, SchedulerSnapshot

SPEC = EngineSpec(
    engine="vllm",
    model="model",
    revision="0",
    device="cpu",
    dtype="float32",
    max_model_len=4096,
    block_size=16,
    num_kv_blocks=512,
    num_layers=2,
    num_kv_heads=2,
    head_dim=16,
    kv_block_bytes=8192,
    vocab_size=1000,
    eos_token_ids=(7,),
)


def profile() -> Profile:
    return Profile(
        provenance=Provenance(
            model="model@0", engine="vllm", device="cpu", dtype="float32", taken_on=datetime.date(2026, 3, 1)
        ),
        samples=(ProfileSample(num_new=16, seconds=0.01), ProfileSample(num_new=512, seconds=0.2)),
    )


def snapshot(**changes: Any) -> SchedulerSnapshot:
    """An idle scheduler at time 0, unless told otherwise."""
    fields: dict[str, Any] = {
        "now_s": 0.0,
        "running": None,
        "suspended": (),
        "waiting": 0,
        "waiting_s": 0.0,
        "waiting_tokens": 0,
        "kv_blocks": 512,
        "kv_blocks_free": 512,
        "preempting": False,
        "prediction": (0.001, 0.0001, 0.0, 0.0),
        "counters": Counters(),
    }
    return SchedulerSnapshot(**{**fields, **changes})
