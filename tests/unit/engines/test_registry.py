"""Engines by name, from a pod's configuration."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowprefill.engines.kv_size import check_kv_fits, default_kv_cache_tokens, memory_limit_bytes
from flowprefill.engines.registry import load_engine, load_tokenizer
from flowprefill.engines.simulated.engine import SimulatedEngine
from flowprefill.errors import InvalidConfiguration, ModelNotLoadable
from flowprefill_crd import PodConfig


def config(**engine: Any) -> PodConfig:
    body = {
        "service": "svc",
        "namespace": "default",
        "revision": "r1",
        "mode": "Disaggregated",
        "model": {"uri": "embedded://smollm2-135m-instruct", "servedName": "small"},
        "engine": {"type": "simulated", **engine},
    }
    return PodConfig.from_json(json.dumps(body))


def test_a_simulated_engine_is_what_its_arguments_say() -> None:
    engine = load_engine(
        config(args=["--cost", "h100/llama3-70b", "--scale", "0.5"], kvCacheTokens=1000, blockSize=32)
    )
    assert isinstance(engine, SimulatedEngine)
    assert engine.spec.device == "h100/llama3-70b x 0.5"
    assert (engine.spec.num_kv_blocks, engine.spec.block_size, engine.spec.model) == (32, 32, "small")
    assert engine.spec.max_model_len == 1000
    assert engine.spec.tensor_parallel_size == 4


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"args": ["--cost", "b200"]}, "no cost model 'b200'; accepted are tiny"),
        ({"args": ["--variant", "x"]}, "no variant 'x'"),
        (
            {"args": ["--speed", "2"]},
            "unrecognized arguments: --speed 2; accepted are --cost, --variant, --scale",
        ),
        ({"args": ["--scale", "fast"]}, "invalid float value: 'fast'"),
        ({"args": ["--scale", "0"]}, "--scale is 0.0"),
        ({"type": "vllm"}, "'vllm' runs inside vLLM's own server"),
    ],
)
def test_a_mistake_is_a_configuration_error_that_says_what_is_accepted(
    engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidConfiguration, match=message):
        load_engine(config(**engine))


def test_the_simulated_tokenizer_gives_texts_back_and_words_for_the_rest() -> None:
    engine = load_engine(config())
    tokenizer = load_tokenizer(config(), engine)
    text = "Grüße, 世界!\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == engine.spec.vocab_size
    assert tokenizer.decode([tokenizer.vocab_size - 1, 300]) == " zazaza bafise"
    assert tokenizer.decode(engine.spec.eos_token_ids) == ""
    chat = tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    assert tokenizer.decode(chat) == "user: Hello\nassistant:"


def test_a_simulated_pod_never_imports_torch() -> None:
    code = (
        "import sys, json\n"
        "from flowprefill_crd import PodConfig\n"
        "from flowprefill.engines.registry import load_engine, load_tokenizer\n"
        f"config = PodConfig.from_json({config().to_json()!r})\n"
        "load_tokenizer(config, load_engine(config))\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def model_directory(path: Path, **changes: Any) -> Path:
    body = {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 512,
        "num_hidden_layers": 10,
        "dtype": "bfloat16",
        **changes,
    }
    (path / "config.json").write_text(json.dumps(body))
    (path / "model.safetensors").write_bytes(b"\0" * 1_000_000)
    return path


def test_the_kv_cache_takes_half_of_what_the_weights_leave(tmp_path: Path) -> None:
    path = model_directory(tmp_path)
    # A token takes 2 * 10 layers * 2 heads * 64 = 2,560 numbers. In float32 the weights grow to 2 MB.
    tokens = default_kv_cache_tokens(path, dtype="float32", limit_bytes=202_000_000)
    assert tokens == 100_000_000 // (2560 * 4)
    assert default_kv_cache_tokens(path, dtype="bfloat16", limit_bytes=201_000_000) == 100_000_000 // (
        2560 * 2
    )
    assert default_kv_cache_tokens(path, limit_bytes=202_000_000) == tokens
    assert default_kv_cache_tokens(path, limit_bytes=0) == 1024
    assert default_kv_cache_tokens(path, limit_bytes=10**15) == 131_072


def test_a_configuration_without_sizes_asks_for_the_number(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 5}')
    with pytest.raises(
        ModelNotLoadable, match=r"does not say 'num_attention_heads'; give engine\.kvCacheTokens"
    ):
        default_kv_cache_tokens(tmp_path)


def test_a_control_groups_limit_counts_where_there_is_one(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    unlimited = memory_limit_bytes(limit)
    assert unlimited == psutil.virtual_memory().total // 4, "three more such pods must fit beside it"
    limit.write_text("1000000\n")
    assert memory_limit_bytes(limit) == 1_000_000
    limit.write_text("max\n")
    assert memory_limit_bytes(limit) == unlimited


def test_a_kv_cache_that_can_never_fit_is_refused_with_its_size_and_the_limit(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(f"{8 * 2**30}\n")
    check_kv_fits(8 * 2**30, 1000, limit)
    with pytest.raises(
        InvalidConfiguration, match=r"kvCacheTokens.* of 500,000 tokens takes 9\.0 GiB.* 8\.0 GiB"
    ):
        check_kv_fits(9 * 2**30, 500_000, limit)
    limit.write_text("max\n")
    with pytest.raises(InvalidConfiguration, match=r"takes 1,048,576\.0 GiB"):
        check_kv_fits(2**50, 10**9, limit)
