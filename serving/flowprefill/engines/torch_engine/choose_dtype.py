"""Which number type is faster on this machine: measured once at start, on the model's own layers.

bfloat16 without hardware for it is several times slower than float32, with it up to twice as fast; no name of a CPU tells.
"""

from __future__ import annotations

import copy
import logging
import time
from typing import Any

import torch
from torch import Tensor, nn

from flowprefill.engines.torch_engine.loading import LoadedModel, Tracer

logger = logging.getLogger(__name__)

NUM_ROWS = 128
NUM_LAYERS = 2
NUM_REPEATS = 3
ADVANTAGE = 1.1
"""How much faster than float32 bfloat16 must be: near a draw all pods of a service should say the same."""


class _Captured(Exception):
    """Ends the model's forward once the first layer's arguments are known."""


def choose(loaded: LoadedModel) -> torch.dtype:
    """The faster type for this model on its device; says both times in the log."""
    device = loaded.model.device
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    args, kwargs = _first_layer_arguments(loaded)
    layers = loaded.layers[:NUM_LAYERS]
    scale = len(loaded.layers) / len(layers)
    copies = {dtype: [_cast(layer, dtype) for layer in layers] for dtype in (torch.bfloat16, torch.float32)}
    times_s = dict.fromkeys(copies, float("inf"))
    loaded.runtime.active = Tracer({})
    try:
        with torch.inference_mode():
            for _ in range(NUM_REPEATS + 1):  # alternating, so that a slow moment hits both
                for dtype, chosen in copies.items():
                    arguments, options = _to(args, dtype), _to(kwargs, dtype)
                    start_s = time.thread_time()
                    for index, layer in enumerate(chosen):
                        loaded.runtime.active.start_tile(index, 0)
                        layer(*arguments, **options)
                    times_s[dtype] = min(times_s[dtype], (time.thread_time() - start_s) * scale)
    finally:
        loaded.runtime.active = None
    bfloat16_s, float32_s = times_s[torch.bfloat16], times_s[torch.float32]
    dtype = torch.bfloat16 if bfloat16_s * ADVANTAGE < float32_s else torch.float32
    logger.info(
        "chose dtype by timing both",
        extra={
            "dtype": str(dtype).removeprefix("torch."),
            "bfloat16_seconds": round(bfloat16_s, 4),
            "float32_seconds": round(float32_s, 4),
            "num_tokens": NUM_ROWS,
        },
    )
    return dtype


def _first_layer_arguments(loaded: LoadedModel) -> tuple[Any, Any]:
    """What the model passes to its first layer for `NUM_ROWS` tokens."""
    seen: list[tuple[Any, Any]] = []

    def capture(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append((args, kwargs))
        raise _Captured

    handle = loaded.layers[0].register_forward_pre_hook(capture, with_kwargs=True)
    try:
        with torch.inference_mode():
            ids = (
                torch.arange(NUM_ROWS, device=loaded.model.device).unsqueeze(0)
                % loaded.model.config.vocab_size
            )
            positions = torch.arange(NUM_ROWS, device=loaded.model.device).unsqueeze(0)
            loaded.model(input_ids=ids, position_ids=positions, use_cache=False)
    except _Captured:
        pass
    finally:
        handle.remove()
    return seen[0]


def _cast(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    # The runtime is shared on purpose; only weights are copied.
    memo = {id(module.flowprefill_runtime): module.flowprefill_runtime for module in layer.modules()}
    return copy.deepcopy(layer, memo).to(dtype)


def _to(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_to(part, dtype) for part in value)
    if isinstance(value, dict):
        return {name: _to(part, dtype) for name, part in value.items()}
    return value
