"""CRDs of other projects (prometheus-operator, KEDA, Gateway API) that the operator and the chart work with."""

from __future__ import annotations

import os
from pathlib import Path

from support.capabilities import require


def foreign_crds(*names: str) -> list[Path]:
    """Files with the CRDs of these names (`podmonitors.monitoring.coreos.com`) in the folder FLOWPREFILL_CRDS.

    They are called `GROUP_PLURAL.yaml`, as controller-gen writes them. Without them the test skips.
    """
    folder = os.environ.get("FLOWPREFILL_CRDS")
    paths = [
        Path(folder or "/nonexistent") / f"{group}_{plural}.yaml" for plural, _, group in map(_parts, names)
    ]
    missing = [path.name for path in paths if not path.is_file()]
    reason = (
        f"{', '.join(missing)} not in {folder}"
        if folder
        else "FLOWPREFILL_CRDS does not name a folder with the CRDs of other projects"
    )
    require("foreign-crds", not missing, reason)
    return paths


def _parts(name: str) -> tuple[str, str, str]:
    return name.partition(".")
