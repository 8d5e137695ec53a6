"""Packaged charts of the past, for upgrades from what users have installed."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

from flowprefill_crd.generate import ROOT
from support.helm import Helm

FIXTURE = ROOT / "tests" / "fixtures" / "charts" / "flowprefill-0.1.0.tgz"
"""The chart as it first worked, for as long as no release is tagged."""

GIT_S = 60.0
CHART_PATH = "charts/flowprefill"


def released_chart(helm: Helm, folder: Path, root: Path = ROOT) -> Path:
    """The packaged chart of the last tag, or `FIXTURE` before there is one (and in a checkout without git)."""
    tag = last_tag(root)
    return FIXTURE if tag is None else chart_of(tag, helm, folder, root)


def last_tag(root: Path = ROOT) -> str | None:
    """The newest tag behind the present commit, or None."""
    done = _git(root, "describe", "--tags", "--abbrev=0")
    return done.stdout.decode().strip() if done.returncode == 0 else None


def chart_of(ref: str, helm: Helm, folder: Path, root: Path = ROOT) -> Path:
    """The chart of a committed revision, packaged into `folder`."""
    done = _git(root, "archive", "--format=tar", ref, CHART_PATH)
    assert done.returncode == 0, f"git archive {ref} {CHART_PATH}: {done.stderr.decode()}"
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder / "source", filter="data")
    packages = folder / "packages"
    helm("package", str(folder / "source" / CHART_PATH), "--destination", str(packages))
    (package,) = packages.glob("*.tgz")
    return package


def _git(root: Path, *args: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(root), *args], capture_output=True, timeout=GIT_S, check=False)
