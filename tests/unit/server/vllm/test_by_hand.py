"""A pod that is started without files: `flowprefill serve --engine vllm --model M -- FLAGS`."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowprefill.errors import InvalidConfiguration
from flowprefill.server.vllm.by_hand import by_hand, model_uri
from flowprefill_crd import PodConfig


@pytest.mark.parametrize(
    ("model", "uri", "name"),
    [
        ("hf://Qwen/Qwen3-8B", "hf://Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("hf://Qwen/Qwen3-8B@main", "hf://Qwen/Qwen3-8B@main", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B", "hf://Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("embedded://smollm2-135m-instruct", "embedded://smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("file:///models/x/", "file:///models/x/", "x"),
    ],
)
def test_a_model_is_named_as_people_do(model: str, uri: str, name: str) -> None:
    assert model_uri(model) == (uri, name)


def test_a_directory_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my model").mkdir()
    monkeypatch.chdir(tmp_path)
    uri, name = model_uri("./my model")
    assert (uri, name) == (
        f"file://{tmp_path}/my%20model",
        "my model",
    ) or uri == f"file://{tmp_path}/my model"


def test_what_is_no_model_is_refused_with_what_is() -> None:
    with pytest.raises(InvalidConfiguration, match=r"'no such thing'.*ORG/NAME"):
        model_uri("no such thing")


def test_flags_that_have_a_place_in_the_configuration_move_there_and_others_stay() -> None:
    pod = by_hand(
        "Qwen/Qwen3-8B",
        "colocated",
        [
            "--max-model-len=32k",
            "-tp",
            "2",
            "--dtype",
            "half",
            "--block_size=32",
            "--served-model-name",
            "qwen",
            "--quantization",
            "fp8",
            "-O3",
        ],
    )
    config = pod.config
    assert config.model.max_model_len == 32_000
    assert (config.prefill.tensor_parallel_size, config.decode.tensor_parallel_size) == (2, 2)
    assert (config.engine.dtype, config.engine.block_size) == ("float16", 32)
    assert config.model.served_name == "qwen"
    assert pod.flags == ("--quantization", "fp8", "-O3")


def test_without_flags_a_pod_has_defaults_and_is_a_valid_document() -> None:
    config = by_hand("Qwen/Qwen3-8B", "prefill", []).config
    assert (config.engine.type, config.mode, config.model.max_model_len) == ("vllm", "Disaggregated", None)
    assert PodConfig.from_json(config.to_json()) == config
    assert (
        by_hand("Qwen/Qwen3-8B", "colocated", ["--max-model-len", "auto"]).config.model.max_model_len is None
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-model-len", "many"], "'many'; accepted are integers from 1"),
        (["--max-model-len"], "accepted is one value"),
        (["--served-model-name", "a", "b"], "accepted is one value"),
        (["--dtype", "int8"], "accepted are auto, float32"),
        (["-tp", "0"], "integers from 1"),
    ],
)
def test_a_value_that_means_nothing_is_refused(flags: list[str], words: str) -> None:
    with pytest.raises(InvalidConfiguration, match=words):
        by_hand("Qwen/Qwen3-8B", "colocated", flags)
