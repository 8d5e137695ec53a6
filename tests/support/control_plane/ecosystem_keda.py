"""KEDA on a node, without its admission webhooks."""

from __future__ import annotations

from pathlib import Path

from support.control_plane.ecosystem_assets import (
    apply_files,
    delete_files,
    ecosystem_crd_files,
    ecosystem_manifest,
    load_program,
)
from support.control_plane.node import Node
from support.control_plane.waiting import until

IMAGES = (
    ("ghcr.io/kedacore/keda:main", "keda-operator", "/keda"),
    ("ghcr.io/kedacore/keda-metrics-apiserver:main", "keda-adapter", "/keda-adapter"),
)
"""Names in the manifest, the program of each, and where the image has it."""
API = "v1beta1.external.metrics.k8s.io"
READY_S = 180.0


class Keda:
    """CRDs and controllers, each to be installed when a test wants them."""

    def __init__(self, node: Node, folder: Path) -> None:
        """`folder` exists and takes what is to be loaded."""
        self._node = node
        self._folder = folder
        self._crds = [*ecosystem_crd_files("keda.sh"), *ecosystem_crd_files("eventing.keda.sh")]
        self._manifest = [ecosystem_manifest("keda.yaml")]

    def install(self) -> None:
        """Apply everything; returns at once."""
        for image, program, path in IMAGES:
            load_program(self._node, image, program, path, self._folder)
        apply_files(self._node, self._crds)
        apply_files(self._node, self._manifest)

    def wait_ready(self) -> None:
        """Wait until autoscalers can ask it. It starts once more while it makes its certificates."""
        query = "jsonpath={.status.conditions[?(@.type=='Available')].status}"

        def serves() -> bool:
            done = self._node.plane.kubectl("get", "apiservice", API, "-o", query, check=False)
            return done.stdout == "True"

        until(serves, "KEDA's API", within_s=READY_S)

    def uninstall(self) -> None:
        # A ScaledObject has a finalizer that only a running KEDA removes.
        if self._node.plane.kubectl("get", "scaledobjects", "-A", check=False).returncode == 0:
            self._node.plane.kubectl("delete", "scaledobjects", "-A", "--all", "--timeout=60s")
        delete_files(self._node, self._manifest)
        delete_files(self._node, self._crds)
