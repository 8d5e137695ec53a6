"""Any Hugging Face causal LM as a preemptible engine, on a CPU or a CUDA device.

The model's own code runs. Preemption points come from wrapping `forward` on instances and from attention and
experts functions registered with transformers, so no model's code is copied.

    engine    the Engine protocol: plan, run, move KV blocks
    loading   find, check and load a model; choose threads and dtype
    layout    which rows, tiles and attention pieces a batch has (pure)
    plan      points and the share of work before each (pure)
    costs     seconds per operator, measured on this machine (pure arithmetic)
    calibrate, choose_dtype  measure them, and which number type is faster
    agreement a check at load against transformers' own forward
    trace     the order of operators inside each decoder layer
    instrument, attention, attention_blocks, experts    where the points are
    run_state one task inside the model; window bounds what a GPU has in flight
    kv        the paged pool;  sampling  next tokens
"""

from __future__ import annotations

from flowprefill.engines.torch_engine.engine import TorchEngine

__all__ = ["TorchEngine"]
