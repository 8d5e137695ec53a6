"""How large a KV cache fits beside a model when nobody says. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from flowprefill.errors import InvalidConfiguration, ModelNotLoadable

KV_SHARE = 0.5
"""Part of what the weights leave; the rest is for activations and everything else in the process."""

UNLIMITED_PART = 4
"""A process without a memory limit of its own counts on one part in so many of the machine's memory."""

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
GIB = 2**30
FEWEST_TOKENS = 1_024
MOST_TOKENS = 131_072

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def memory_limit_bytes(cgroup_limit: Path = CGROUP_LIMIT) -> int:
    """Memory this process may use: its control group's limit, or a part of the machine's memory when there is none.

    A process without a limit shares the machine with other pods and with everything else on it.
    """
    limit = _cgroup_limit_bytes(cgroup_limit)
    return _machine_bytes() // UNLIMITED_PART if limit is None else min(limit, _machine_bytes())


def check_kv_fits(num_bytes: int, num_tokens: int, cgroup_limit: Path = CGROUP_LIMIT) -> None:
    """Raise `InvalidConfiguration` when a KV cache in main memory is larger than all that this process can ever have."""
    limit = min(_cgroup_limit_bytes(cgroup_limit) or _machine_bytes(), _machine_bytes())
    if num_bytes > limit:
        raise InvalidConfiguration(
            too_large(num_bytes, num_tokens, f"this pod can have {limit / GIB:.1f} GiB")
        )


def too_large(num_bytes: int, num_tokens: int, limit: str) -> str:
    """What to tell whoever asked for a KV cache that does not fit."""
    return (
        f"engine.kvCacheTokens: a KV cache of {num_tokens:,} tokens takes {num_bytes / GIB:,.1f} GiB, and {limit}; "
        f"accepted are fewer tokens, or none to let the pod choose"
    )


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_limit_bytes(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def default_kv_cache_tokens(path: Path, *, dtype: str = "auto", limit_bytes: int | None = None) -> int:
    """Tokens of KV cache for the model in directory `path`: half of what its weights leave of the memory.

    `limit_bytes` is this process's memory limit unless given. With dtype `auto` the wider of the formats that may be
    chosen counts. Raises ModelNotLoadable when the configuration does not say the sizes.
    """
    config = _text_config(json.loads((path / "config.json").read_text()))
    item_bytes = _ITEM_BYTES.get(dtype, 4)
    stored_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    stored_item_bytes = _ITEM_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 4)
    weights_bytes = stored_bytes * item_bytes // stored_item_bytes
    if limit_bytes is None:
        limit_bytes = memory_limit_bytes()
    tokens = int((limit_bytes - weights_bytes) * KV_SHARE) // token_bytes(path, dtype=dtype)
    return max(min(tokens, MOST_TOKENS), FEWEST_TOKENS)


def token_bytes(path: Path, *, dtype: str = "auto") -> int:
    """Bytes that one token takes in the KV cache of the model in directory `path`.

    With dtype `auto` the wider of the formats that may be chosen counts. Raises ModelNotLoadable when the configuration
    does not say the sizes.
    """
    config = _text_config(json.loads((path / "config.json").read_text()))
    try:
        num_heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or num_heads
        head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
        per_token: int = 2 * config["num_hidden_layers"] * kv_heads * head_dim
    except KeyError as error:
        raise ModelNotLoadable(
            f"{path / 'config.json'} does not say {error}; give engine.kvCacheTokens to load it all the same"
        ) from None
    return per_token * _ITEM_BYTES.get(dtype, 4)


def longest_prompt(path: Path) -> int | None:
    """The model's own limit of prompt and answer in tokens, before any stretching of positions; None when it does not say."""
    config = _text_config(json.loads((path / "config.json").read_text()))
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if isinstance(value := config.get(name), int):
            return value
    return None


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Models for text and images keep the language model's sizes in a part of their own."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else config
