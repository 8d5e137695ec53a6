"""Models that the engine would serve wrongly are refused at load time, with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402 - what follows needs torch

from flowprefill.engines.torch_engine import TorchEngine
from flowprefill.errors import InvalidConfiguration, ModelNotLoadable
from support.tiny_models import tiny_model

pytestmark = pytest.mark.torch


def load(path: Path) -> TorchEngine:
    return TorchEngine.load(path, dtype="float32", kv_cache_tokens=64)


@pytest.mark.parametrize(
    ("model_type", "overrides", "word"),
    [
        ("gemma2", {"sliding_window": 8}, "softcap"),
        ("gpt_oss", {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, "s_aux"),
        ("bloom", {}, "BloomForCausalLM"),
        ("mamba", {}, "attention"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
    ],
)
def test_a_model_that_needs_what_the_engine_lacks_is_refused_by_name(
    model_type: str, overrides: dict[str, Any], word: str
) -> None:
    with pytest.raises(ModelNotLoadable, match=word):
        load(tiny_model(model_type, **overrides))


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    with pytest.raises(ModelNotLoadable, match="encoder-decoder"):
        load(tmp_path)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotLoadable, match=r"config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelNotLoadable, match="cannot load"):
        load(tmp_path)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="int8"):
        TorchEngine.load(tiny_model("llama"), dtype="int8", kv_cache_tokens=64)


def test_a_layer_that_looks_at_other_rows_by_itself_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles would cut such a layer's view. Here every layer subtracts the mean over the rows it is given."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x - x.mean(dim=1, keepdim=True)))
    with pytest.raises(ModelNotLoadable, match="differ"):
        load(tiny_model("llama"))
