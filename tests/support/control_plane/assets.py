"""Where the binaries of a control plane are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from support.capabilities import require

Release = Literal["newest", "oldest"]
RELEASES: tuple[Release, ...] = ("newest", "oldest")

OLDEST = "1.34"
"""Oldest Kubernetes that is supported; its binaries are in a folder of this name inside the newest's."""

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")

DOWNLOADED = Path(__file__).parents[3] / ".cache" / "control-plane"
"""Where `make control-plane` puts the official programs."""

DISPOSABLE = "FLOWPREFILL_TEST_KUBECONFIG"
"""Names the kubeconfig of a cluster that tests may write to and leave things in, as kind makes it."""


def assets(release: Release) -> Path:
    """The folder with the programs of a release: KUBEBUILDER_ASSETS, else the downloaded one; else the test skips."""
    named = os.environ.get("KUBEBUILDER_ASSETS")
    folder = Path(named) if named else DOWNLOADED
    if release == "oldest":
        folder = folder / OLDEST
    missing = [name for name in PROGRAMS if not os.access(folder / name, os.X_OK)]
    from_where = (
        "KUBEBUILDER_ASSETS names"
        if named
        else "KUBEBUILDER_ASSETS is not set and `make control-plane` fills"
    )
    require(
        "control-plane", not missing, f"{', '.join(missing)} not in {folder}, the folder that {from_where}"
    )
    return folder


def has_assets(release: Release) -> bool:
    """Whether a control plane of that release can be started here."""
    folder = Path(os.environ.get("KUBEBUILDER_ASSETS") or DOWNLOADED)
    if release == "oldest":
        folder = folder / OLDEST
    return all(os.access(folder / name, os.X_OK) for name in PROGRAMS)


def disposable_kubeconfig() -> Path | None:
    """The kubeconfig of the user's disposable cluster. Fails when the variable names no file."""
    named = os.environ.get(DISPOSABLE)
    if not named:
        return None
    assert Path(named).is_file(), f"{DISPOSABLE} is {named}, which is no file; name a kubeconfig"
    return Path(named)
