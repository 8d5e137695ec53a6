"""Generated models of three families, as directories in the hub's form that vLLM and transformers load alike.

Written tensor by tensor under the names that published checkpoints use, from a fixed seed and without torch: the same bytes in
every environment. Weights are scaled so that attention is peaked, experts differ and logits are well apart: a mistake in any
operator moves the answer. float32 throughout, because bfloat16 has near ties.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from support.vllm.environment import cache_directory
from support.vllm.tokens import VOCAB_SIZE, write_tokenizer

Family = Literal["llama", "qwen3", "qwen3_moe"]
FAMILIES: tuple[Family, ...] = ("llama", "qwen3", "qwen3_moe")
ARCHITECTURES: Mapping[Family, str] = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
NUM_EXPERTS, EXPERTS_PER_TOKEN = 8, 2
HEAD_DIM = 64

Weights = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a generated model is like. Heads have 64 dimensions; two key/value heads let two ranks share it."""

    family: Family
    num_layers: int = 4
    hidden_size: int = 256
    intermediate_size: int = 512
    num_heads: int = 4
    num_kv_heads: int = 2
    max_positions: int = 32_768
    seed: int = 20

    def __post_init__(self) -> None:
        assert self.family in FAMILIES, f"family is {self.family!r}; accepted are {', '.join(FAMILIES)}"
        assert self.num_heads % self.num_kv_heads == 0, self


def small(family: Family) -> Shape:
    """The model of a family that most tests use: 3 to 7 million parameters."""
    return Shape(family=family)


DEEP = Shape(family="llama", num_layers=24)
"""As deep as models in use, so that one layer is a small part of a prefill."""


def model_directory(shape: Shape) -> Path:
    """The model's directory, generated on first use and kept under a digest of its shape and of this code."""
    source = b"".join((Path(__file__).with_name(name)).read_bytes() for name in ("models.py", "tokens.py"))
    key = hashlib.sha256(source + json.dumps(asdict(shape), sort_keys=True).encode()).hexdigest()[:16]
    target = cache_directory() / "models" / f"{shape.family}-{shape.num_layers}-{key}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as temporary:
        ready = Path(temporary) / target.name
        write_model(shape, ready)
        try:
            os.rename(ready, target)
        except OSError:
            if not target.is_dir():  # else another process was first, with the same bytes
                raise
    return target


def write_model(shape: Shape, directory: Path) -> None:
    """Write configuration, weights and tokenizer."""
    from safetensors.numpy import save_file

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(configuration(shape), indent=2, sort_keys=True))
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    write_tokenizer(directory)
    save_file(dict(tensors(shape)), directory / "model.safetensors", metadata={"format": "pt"})


def configuration(shape: Shape) -> dict[str, Any]:
    """config.json."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[shape.family]],
        "model_type": shape.family,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_positions,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": VOCAB_SIZE,
    }
    match shape.family:
        case "llama":
            return config | {"mlp_bias": False}
        case "qwen3":
            return config
        case "qwen3_moe":
            return config | {
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "moe_intermediate_size": shape.intermediate_size // 4,
                "norm_topk_prob": True,
                "num_experts": NUM_EXPERTS,
                "num_experts_per_tok": EXPERTS_PER_TOKEN,
            }


def tensors(shape: Shape) -> Iterator[tuple[str, Weights]]:
    """Names and values [rows, columns] or [size], in a fixed order."""
    random = np.random.default_rng(shape.seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Weights:
        """Gives a vector of unit entries entries of size `gain`."""
        values = random.standard_normal((rows, columns), dtype=np.float32)
        return values * np.float32(gain / columns**0.5)

    def norm(size: int, around: float = 1.0) -> Weights:
        return np.float32(around) + np.float32(0.1) * random.standard_normal(size, dtype=np.float32)

    def mlp(prefix: str, inner: int) -> Iterator[tuple[str, Weights]]:
        yield f"{prefix}.gate_proj.weight", matrix(inner, hidden, 2.0)
        yield f"{prefix}.up_proj.weight", matrix(inner, hidden)
        yield f"{prefix}.down_proj.weight", matrix(hidden, inner)

    hidden = shape.hidden_size
    queries, keys = shape.num_heads * HEAD_DIM, shape.num_kv_heads * HEAD_DIM
    yield "model.embed_tokens.weight", matrix(VOCAB_SIZE, hidden, hidden**0.5)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", norm(hidden)
        yield f"{prefix}.self_attn.q_proj.weight", matrix(queries, hidden, 2.0)
        yield f"{prefix}.self_attn.k_proj.weight", matrix(keys, hidden, 2.0)
        yield f"{prefix}.self_attn.v_proj.weight", matrix(keys, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", matrix(hidden, queries)
        if shape.family != "llama":
            yield f"{prefix}.self_attn.q_norm.weight", norm(HEAD_DIM, 2.0)
            yield f"{prefix}.self_attn.k_norm.weight", norm(HEAD_DIM, 2.0)
        yield f"{prefix}.post_attention_layernorm.weight", norm(hidden)
        if shape.family == "qwen3_moe":
            yield f"{prefix}.mlp.gate.weight", matrix(NUM_EXPERTS, hidden, 2.0)
            for expert in range(NUM_EXPERTS):
                yield from mlp(f"{prefix}.mlp.experts.{expert}", shape.intermediate_size // 4)
        else:
            yield from mlp(f"{prefix}.mlp", shape.intermediate_size)
    yield "model.norm.weight", norm(hidden)
    yield "lm_head.weight", matrix(VOCAB_SIZE, hidden, 3.0)
