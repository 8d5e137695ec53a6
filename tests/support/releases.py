"""Releases of the past, for upgrades from what users run."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from flowprefill_crd.generate import ROOT
from support.helm import Helm

FIXTURE = ROOT / "tests" / "fixtures" / "releases" / "flowprefill-0.1.0.tar.xz"
"""The sources of chart and operator as they first worked, for as long as no release is tagged."""

SOURCES = (
    "charts/flowprefill",
    "crds/flowprefill_crd",
    "operator/flowprefill_operator",
    "serving/flowprefill",
)
GIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Release:
    """The sources of a chart and of the operator that it installs."""

    folder: Path

    def chart(self, helm: Helm) -> Path:
        """The packaged chart."""
        packages = self.folder / "packages"
        helm("package", str(self.folder / SOURCES[0]), "--destination", str(packages))
        (package,) = packages.glob("*.tgz")
        return package

    @property
    def python_path(self) -> str:
        """PYTHONPATH with which `python -m flowprefill.cli operator` is this release's operator."""
        return self.python_path_at(self.folder)

    def python_path_at(self, folder: Path) -> str:
        """`python_path` where the sources lie in another folder, such as one of an image."""
        return os.pathsep.join(str((folder / source).parent) for source in SOURCES[1:])


def last_release(folder: Path, root: Path = ROOT) -> Release:
    """The release of the last tag, or `FIXTURE` before there is one (and in a checkout without git), laid into `folder`."""
    tag = last_tag(root)
    return release_of(FIXTURE.read_bytes() if tag is None else _archive(tag, root), folder)


def last_tag(root: Path = ROOT) -> str | None:
    """The newest tag behind the present commit, or None."""
    done = _git(root, "describe", "--tags", "--abbrev=0")
    return done.stdout.decode().strip() if done.returncode == 0 else None


def release_of(archive: bytes, folder: Path) -> Release:
    """The release whose sources are in an archive."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        opened.extractall(folder, filter="data")
    return Release(folder)


def _archive(ref: str, root: Path) -> bytes:
    done = _git(root, "archive", "--format=tar", ref, *SOURCES)
    assert done.returncode == 0, f"git archive {ref}: {done.stderr.decode()}"
    return done.stdout


def _git(root: Path, *args: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(root), *args], capture_output=True, timeout=GIT_S, check=False)
