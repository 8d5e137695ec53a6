"""The Dockerfiles as text; tests/cluster/node builds and runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
DOCKERFILES = sorted((REPOSITORY / "images").glob("*/Dockerfile"))


def _instructions(dockerfile: Path) -> list[str]:
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text("utf-8"), flags=re.MULTILINE)
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    program = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [program, "--no-color", dockerfile], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_every_installation_is_pinned(dockerfile: Path) -> None:
    installs = [line for line in _instructions(dockerfile) if "pip install" in line]
    assert installs
    for line in installs:
        for command in re.split(r"&&", line):
            if "pip install" in command:
                assert "-c constraints.txt" in command or "--no-deps --no-index" in command, command


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_images_end_as_user_10001_with_the_command_as_entry_point(dockerfile: Path) -> None:
    instructions = _instructions(dockerfile)
    assert 'ENTRYPOINT ["flowprefill"]' in instructions
    assert "USER 10001:10001" in instructions[-4:]


def test_the_embedded_model_is_the_last_layer_of_the_serving_image() -> None:
    instructions = _instructions(REPOSITORY / "images" / "serving" / "Dockerfile")
    layers = [line for line in instructions if line.startswith(("COPY", "RUN", "ADD"))]
    assert layers[-1] == "COPY --from=models /opt/flowprefill/models /opt/flowprefill/models"
