"""Generated models: the same bytes everywhere, in the form that published checkpoints have, and a tokenizer that loses nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowprefill.engines.tokenizer import Tokenizer, load_tokenizer
from support.vllm.models import DEEP, FAMILIES, Family, Shape, model_directory, small, write_model
from support.vllm.tokens import VOCAB_SIZE, random_prompt

pytestmark = pytest.mark.torch
"""As safetensors, which come with the extra that brings torch."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("model") / "model"
    write_model(small("llama"), directory)
    return load_tokenizer(directory)


def digests(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shape_gives_the_same_bytes_every_time(family: Family, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_model(small(family), tmp_path / name)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_a_model_is_made_once_for_a_shape(cache: Path) -> None:
    first = model_directory(small("llama"))
    (first / "mark").touch()
    assert (model_directory(small("llama")) / "mark").exists()
    other = model_directory(dataclasses.replace(small("llama"), seed=21))
    assert digests(other)["model.safetensors"] != digests(first)["model.safetensors"]
    assert sorted(first.parent.iterdir()) == sorted([first, other]), "nothing half made stays"


@pytest.mark.parametrize(
    "shape", [*map(small, FAMILIES), DEEP], ids=lambda shape: f"{shape.family}-{shape.num_layers}"
)
def test_transformers_finds_every_weight_and_no_other(shape: Shape) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model, told = AutoModelForCausalLM.from_pretrained(
        model_directory(shape), dtype="auto", output_loading_info=True
    )
    assert not any(told.values()), told
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model.config.num_key_value_heads == 2, "two ranks share it"
    assert model.config.max_position_embeddings == 32_768


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_of_a_prompt_moves_the_last_logits(family: Family) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_directory(small(family)), dtype="auto").eval()
    prompt = random_prompt(24, seed=1)
    variants = [prompt, *([*prompt[:i], prompt[i] - 1, *prompt[i + 1 :]] for i in range(len(prompt)))]
    swapped = [prompt[1], prompt[0], *prompt[2:]]
    with torch.inference_mode():
        logits = model(torch.tensor([*variants, swapped]), use_cache=False, logits_to_keep=1).logits[:, 0]
    spread = logits[0].std()
    assert spread > 2, "the best token is far from the next"
    changes = (logits[1:] - logits[0]).std(-1) / spread
    assert changes.min() > 0.05, changes.tolist()


def test_every_id_has_a_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert all(tokenizer.token_id(text) == i for i, text in enumerate(("<s>", "</s>")))
    assert all(tokenizer.decode([token_id]) for token_id in range(2, VOCAB_SIZE))


@given(text=st.text(max_size=60).filter(lambda text: "<s>" not in text and "</s>" not in text))
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_random_prompt_is_its_own_text_and_repeats(tokenizer: Tokenizer) -> None:
    prompt = random_prompt(300, seed=3)
    assert prompt == random_prompt(300, seed=3) != random_prompt(300, seed=4)
    assert len(tokenizer.decode(prompt)) == 600
    assert tokenizer.decode(prompt[:150]) == tokenizer.decode(prompt)[:300]


def test_the_configuration_counts_what_the_weights_are(tmp_path: Path) -> None:
    from safetensors import safe_open

    write_model(small("qwen3_moe"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    with safe_open(tmp_path / "model" / "model.safetensors", "numpy") as weights:
        names = list(weights.keys())
        experts = {name.split(".")[5] for name in names if ".experts." in name}
        assert weights.get_slice("lm_head.weight").get_shape() == [
            config["vocab_size"],
            config["hidden_size"],
        ]
    assert len(experts) == config["num_experts"]
    assert len({name.split(".")[2] for name in names if ".layers." in name}) == config["num_hidden_layers"]
