"""What an image installs before the project."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

REPOSITORY = Path(__file__).parents[3]
SCRIPT = runpy.run_path(str(REPOSITORY / "images" / "requirements.py"))
# The script is no module of a package: images run it before anything is installed.
requirements = cast(Callable[[Path, list[str]], list[str]], SCRIPT["requirements"])


def _names(extra: str) -> set[str]:
    return {re.split(r"[<>=\[]", line)[0] for line in requirements(REPOSITORY / "pyproject.toml", [extra])}


@pytest.mark.parametrize("extra", ["operator", "proxy"])
def test_operator_and_proxy_get_no_torch(extra: str) -> None:
    assert not _names(extra) & {"torch", "transformers", "accelerate", "safetensors"}


def test_an_extra_brings_those_that_it_names(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text(
        '[project]\nname = "thing"\ndependencies = ["base>=1"]\n'
        '[project.optional-dependencies]\nproxy = ["httpx"]\nserving = ["thing[proxy]", "torch>=2,<3"]\n'
    )
    assert requirements(file, ["serving"]) == ["base>=1", "httpx", "torch>=2,<3"]
    assert requirements(file, []) == ["base>=1"]


def test_an_unknown_extra_is_refused() -> None:
    with pytest.raises(KeyError, match="nothing"):
        requirements(REPOSITORY / "pyproject.toml", ["nothing"])


@pytest.mark.parametrize(
    ("extra", "constraints"),
    [
        ("operator", "constraints.txt"),
        ("proxy", "constraints.txt"),
        ("serving", "constraints.txt"),
        ("vllm", "constraints-vllm.txt"),
        ("vllm-cpu", "constraints-vllm.txt"),
    ],
)
def test_everything_that_images_install_is_pinned(extra: str, constraints: str) -> None:
    lines = (REPOSITORY / constraints).read_text("utf-8").splitlines()
    lines += requirements(REPOSITORY / "pyproject.toml", [extra])  # an extra may pin by itself
    pinned = {re.split("==", line)[0].lower().replace("_", "-") for line in lines if "==" in line}
    assert {name.lower().replace("_", "-") for name in _names(extra)} <= pinned


def test_what_the_images_with_vllm_install_besides_is_pinned() -> None:
    lines = (REPOSITORY / "constraints-vllm.txt").read_text("utf-8").splitlines()
    assert {"nixl", "nixl-cu12", "gguf", "accelerate"} <= {line.partition("==")[0] for line in lines}
