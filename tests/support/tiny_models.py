"""Small random models of the families that the torch engine is for, as directories that it loads.

Weights are large enough that attention, routing and positions all move the logits, so that a mistake shows.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VOCAB_SIZE = 211
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
MOE: Mapping[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SLIDING_WINDOW = 20

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": SLIDING_WINDOW},
    "smollm3": {"no_rope_layers": [1, 0]},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": {**MOE, "norm_topk_prob": True, "decoder_sparse_step": 1},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1},
    "gemma3_text": {"sliding_window": SLIDING_WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
}
"""What each family adds to `COMMON`, by transformers' model type."""


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="flowprefill-tiny-models-")


def tiny_model(family: str, **overrides: Any) -> Path:
    """The directory of a random model of this type, the same in every run."""
    return _tiny_model(family, json.dumps(overrides, sort_keys=True))


@functools.cache
def _tiny_model(family: str, overrides: str) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES.get(family, {}), **json.loads(overrides)})
    with torch.random.fork_rng():
        torch.manual_seed(20)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    directory = Path(tempfile.mkdtemp(prefix=f"{family}-", dir=_root().name))
    model.save_pretrained(directory)
    return directory


@functools.cache
def plain_model(path: Path, dtype: str = "float32") -> Any:
    """The model as transformers alone loads it: what the engine's results are compared with."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()


def plain_logits(path: Path, token_ids: list[int], dtype: str = "float32") -> Any:
    """Logits [V] after the last token, from one plain forward over the whole prompt."""
    import torch

    with torch.inference_mode():
        return plain_model(path, dtype)(torch.tensor([token_ids]), use_cache=False, logits_to_keep=1).logits[
            0, 0
        ]


def plain_greedy(path: Path, token_ids: list[int], num_tokens: int) -> list[int]:
    """Greedy continuation, each token from one plain forward over everything before it."""
    tokens = list(token_ids)
    for _ in range(num_tokens):
        tokens.append(int(plain_logits(path, tokens).argmax()))
    return tokens[len(token_ids) :]
