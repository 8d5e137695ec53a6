"""prometheus-operator and a Prometheus on a node, which scrapes what any PodMonitor of the cluster names."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from support.control_plane.ecosystem_assets import (
    apply_files,
    ecosystem_crd_files,
    ecosystem_manifest,
    load_program,
)
from support.control_plane.node import Node

NAMESPACE = "default"
NAME = "main"
"""The manifest's Prometheus, which selects every PodMonitor and scrapes every 5 s."""
ADDRESS = f"http://prometheus-operated.{NAMESPACE}.svc:9090"
HASTEN_S = 3.0
IMAGES = (
    ("quay.io/prometheus-operator/prometheus-operator:v0.85.0", "prometheus-operator", "/bin/operator"),
    (
        "quay.io/prometheus-operator/prometheus-config-reloader:v0.85.0",
        "prometheus-config-reloader",
        "/bin/prometheus-config-reloader",
    ),
    ("quay.io/prometheus/prometheus:v3.16.0", "prometheus", "/bin/prometheus"),
)
"""Names in the manifest, the program of each, and where the image has it."""

Json = dict[str, Any]


class Prometheus:
    """What a Prometheus in the cluster knows."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._hastened_s = time.monotonic()

    def targets(self, namespace: str) -> list[Json]:
        """What it scrapes in a namespace, up or down."""
        self._hasten()
        found = self._get("targets?state=active")["activeTargets"]
        return [target for target in found if target["labels"].get("namespace") == namespace]

    def query(self, promql: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series that answers an instant query."""
        found = self._get(f"query?query={quote(promql, safe='')}")["result"]
        return [(item["metric"], float(item["value"][1])) for item in found]

    def _hasten(self) -> None:
        """A pod gets a changed Secret, as here the list of what to scrape, within 90 s, or when the pod is changed."""
        now_s = time.monotonic()
        if now_s - self._hastened_s < HASTEN_S:
            return
        self._hastened_s = now_s
        pod = ("pod", f"prometheus-{NAME}-0", "--namespace", NAMESPACE)
        self._node.plane.kubectl("annotate", "--overwrite", *pod, f"looked-at={now_s}")

    def _get(self, what: str) -> Json:
        path = f"/api/v1/namespaces/{NAMESPACE}/services/prometheus-operated:9090/proxy/api/v1/{what}"
        answer: Json = json.loads(self._node.plane.kubectl("get", "--raw", path).stdout)
        found: Json = answer["data"]
        return found


def install_prometheus(node: Node, folder: Path) -> Prometheus:
    """A Prometheus that scrapes; it goes with the node. `folder` exists and takes what is to be loaded."""
    crds = ecosystem_crd_files("monitoring.coreos.com")
    manifest = ecosystem_manifest("prometheus-operator.yaml")
    for image, program, path in IMAGES:
        load_program(node, image, program, path, folder)
    kubectl = node.plane.kubectl
    apply_files(node, crds)
    kubectl("wait", "--for=condition=Established", "--timeout=60s", *(f"--filename={crd}" for crd in crds))
    apply_files(node, [manifest])
    available = ("wait", "--for=condition=Available", f"prometheus/{NAME}", "--namespace", NAMESPACE)
    kubectl(*available, "--timeout=110s")
    return Prometheus(node)
