"""The project's own images, built from its Dockerfiles by its own script, as files that a node can load.

The base image is made from Debian's packages, so that nothing is asked of an image registry. Everything is kept below
`FLOWPREFILL_TEST_CACHE` (default `~/.cache/flowprefill-tests`): what is unchanged is built once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from filelock import FileLock

from support.capabilities import require
from support.control_plane.images_base import base_image
from support.control_plane.images_buildah import BUILD_S, Buildah, run_logged
from support.control_plane.images_pip import pip_settings

ImageName = Literal["operator", "serving", "proxy", "serving-vllm-cpu"]

REPOSITORY = Path(__file__).parents[3]
INPUTS = (
    "constraints.txt",
    "constraints-vllm.txt",
    "pyproject.toml",
    "scripts/vllm_name.py",
    "images",
    "crds",
    "operator",
    "serving",
    "README.md",
    "LICENSE",
)
"""What a build sees."""
BUILD_TOOLS = ("buildah", "debootstrap", "runc", "fuse-overlayfs")
MAX_IMAGES = 60
"""Images in the store, unnamed ones included, from which on the next build starts afresh."""
LOCK_S = 2400.0
INDEX_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An archive with one image under the name that the operator plans with."""

    reference: str
    archive: Path
    size_over_base_bytes: int


def image(name: ImageName) -> Image:
    """An image of the present sources, built now if it has not been; the test skips where it cannot be."""
    missing = [
        tool for tool in BUILD_TOOLS if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") is None
    ]
    reason = f"{', '.join(missing)} not on PATH; on Debian: apt-get install {' '.join(BUILD_TOOLS)}"
    require("images", not missing, reason)
    require("images", os.geteuid() == 0, "building images needs root")
    cache = cache_folder()
    key = _key()
    archive = cache / f"{name}-{key}.tar"
    size = cache / f"{name}-{key}.size"
    if not size.is_file():
        with FileLock(cache / "images.lock", timeout=LOCK_S):
            if not size.is_file():  # another run may have built it meanwhile
                _replace(name, cache, archive, size)
    return Image(reference=reference(name), archive=archive, size_over_base_bytes=int(size.read_text()))


def cache_folder() -> Path:
    """Where images and the store that they are built in are kept."""
    cache = Path(os.environ.get("FLOWPREFILL_TEST_CACHE", Path.home() / ".cache" / "flowprefill-tests"))
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def reference(name: ImageName) -> str:
    """The name under which a node knows an image."""
    return f"docker.io/flowprefill/{name}:{version('flowprefill')}"


def _replace(name: ImageName, cache: Path, archive: Path, size: Path) -> None:
    """Build an image in the place of all but the newest that is there: another run may be about to load that."""
    for old in sorted(cache.glob(f"{name}-*.size"), key=lambda file: file.stat().st_mtime)[:-1]:
        old.with_suffix(".tar").unlink(missing_ok=True)
        old.unlink()
    done = size.with_suffix(".new")
    done.write_text(str(_build(name, Buildah(cache / "buildah"), archive)))
    done.rename(size)


def _build(name: ImageName, buildah: Buildah, archive: Path) -> int:
    """Build, write the archive and return the size over the base in bytes."""
    if buildah.num_images() > MAX_IMAGES:
        buildah.clear()
    base = base_image(buildah)
    pip = pip_settings()
    mounts = {path: path for path in pip.local}
    mounts[Path("/etc/pip.conf")] = pip.write(buildah.folder / "pip.conf")
    flags = buildah.build_flags(mounts)
    assert not any(" " in flag for flag in flags), f"a path has a space: {flags}"
    environment = {**buildah.environment, "BUILDER": "buildah", "BASE": base, "BUILD_FLAGS": " ".join(flags)}
    if pip.brings_torch or not _cpu_index_answers():
        environment["TORCH_INDEX"] = ""
    run_logged(["sh", str(REPOSITORY / "images" / "build.sh"), name], environment, BUILD_S)
    local = f"localhost/flowprefill/{name}:{version('flowprefill')}"
    partial = archive.with_suffix(".partial")
    buildah.export(local, partial, reference(name))
    partial.rename(archive)
    return buildah.size_bytes(local) - buildah.size_bytes(base)


def _key() -> str:
    """Changes with every file that a build sees."""
    found = hashlib.sha256()
    for path in _files():
        found.update(f"{path.relative_to(REPOSITORY)}\0".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def _files() -> Iterator[Path]:
    for name in INPUTS:
        top = REPOSITORY / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and path.suffix != ".pyc":
                yield path


def _cpu_index_answers() -> bool:
    """Whether the index that the Dockerfile names can be reached from here."""
    dockerfile = (REPOSITORY / "images" / "serving" / "Dockerfile").read_text()
    index = dockerfile.partition("ARG TORCH_INDEX=")[2].split()[0]
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=INDEX_S):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False
