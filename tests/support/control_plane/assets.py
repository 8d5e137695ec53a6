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


def assets(release: Release) -> Path:
    """The folder with the programs of a release, from KUBEBUILDER_ASSETS; without it the test skips."""
    named = os.environ.get("KUBEBUILDER_ASSETS")
    folder = Path(named or "/nonexistent")
    if release == "oldest":
        folder = folder / OLDEST
    missing = [name for name in PROGRAMS if not os.access(folder / name, os.X_OK)]
    reason = (
        f"{', '.join(missing)} not in {folder}"
        if named
        else "KUBEBUILDER_ASSETS does not name a folder with etcd, kube-apiserver, kube-controller-manager, "
        "kube-scheduler and kubectl"
    )
    require("control-plane", not missing, reason)
    return folder
