"""CRDs of projects that the operator integrates with: KEDA, prometheus-operator, Gateway API. Never part of this project."""

from __future__ import annotations

import os
from pathlib import Path

from support.capabilities import require

VARIABLE = "FLOWPREFILL_CRDS"
CRDS = (
    "gateway.networking.k8s.io_httproutes.yaml",
    "keda.sh_scaledobjects.yaml",
    "monitoring.coreos.com_podmonitors.yaml",
)
"""Files of the CRDs whose objects are planned."""


def ecosystem_crds(names: tuple[str, ...] = CRDS) -> tuple[Path, ...]:
    """The files of these CRDs in the folder that FLOWPREFILL_CRDS names; without it the test skips."""
    named = os.environ.get(VARIABLE)
    folder = Path(named or "/nonexistent")
    missing = [name for name in names if not (folder / name).is_file()]
    reason = (
        f"{', '.join(missing)} not in {folder}"
        if named
        else f"{VARIABLE} does not name a folder with the CRDs of KEDA, prometheus-operator and the Gateway API, "
        "each in a file GROUP_PLURAL.yaml"
    )
    require("ecosystem-crds", not missing, reason)
    return tuple(folder / name for name in names)
