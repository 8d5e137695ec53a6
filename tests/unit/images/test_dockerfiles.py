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
                assert (
                    re.search(r"-c constraints(-vllm)?\.txt", command) or "--no-deps --no-index" in command
                ), command


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_images_end_as_user_10001_with_the_command_as_entry_point(dockerfile: Path) -> None:
    instructions = _instructions(dockerfile)
    assert 'ENTRYPOINT ["flowprefill"]' in instructions
    assert "USER 10001:10001" in instructions[-4:]


@pytest.mark.parametrize("image", ["serving", "serving-vllm"])
def test_the_embedded_model_is_the_last_layer_of_a_serving_image(image: str) -> None:
    instructions = _instructions(REPOSITORY / "images" / image / "Dockerfile")
    layers = [line for line in instructions if line.startswith(("COPY", "RUN", "ADD"))]
    assert layers[-1] == "COPY --from=models /opt/flowprefill/models /opt/flowprefill/models"


def test_builds_with_vllm_see_what_they_copy() -> None:
    """.dockerignore shuts everything out that it does not name."""
    let_in = {
        line[1:] for line in (REPOSITORY / ".dockerignore").read_text("utf-8").splitlines() if line[:1] == "!"
    }
    for dockerfile in DOCKERFILES:
        for line in _instructions(dockerfile):
            words = line.split()
            if words[0] == "COPY" and not words[1].startswith("--from"):
                for source in words[1:-1]:
                    assert {source, *map(str, Path(source).parents)} & let_in, f"{dockerfile}: {source}"
                    assert (REPOSITORY / source).exists()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_image_for_gpus_asks_no_index_for_cpu_builds_and_the_one_for_cpus_has_its_cures(
    device: str,
) -> None:
    """Runs the one step that differs with a pip that prints what it is asked for."""
    dockerfile = (REPOSITORY / "images" / "serving-vllm" / "Dockerfile").read_text("utf-8")
    step = dockerfile.partition('if [ "${DEVICE}" = cuda ]')[2].partition("\n\n")[0].replace("\\\n", "")
    script = (
        f'pip() {{ echo "pip $*"; }}; python3() {{ echo "python3 $*"; }}; if [ "${{DEVICE}}" = cuda ]{step}'
    )
    done = subprocess.run(
        ["/bin/sh", "-c", script],
        env={"DEVICE": device, "TORCH_INDEX": "https://cpu.example"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ("--extra-index-url https://cpu.example" in done.stdout) == (device == "cpu")
    removed = re.findall(r"^pip uninstall -q -y (.*)$", done.stdout, re.MULTILINE)
    assert removed == (["torchvision torchaudio torchcodec triton"] if device == "cpu" else [])
    assert ("python3 vllm_name.py" in done.stdout.splitlines()) == (device == "cpu")
