"""prometheus-operator and a Prometheus on a node, which scrapes what any PodMonitor of the cluster names."""

from __future__ import annotations

import base64
import gzip
import json
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
from support.control_plane.waiting import until

NAMESPACE = "default"
NAME = "main"
"""The manifest's Prometheus, which selects every PodMonitor and scrapes every 5 s."""
ADDRESS = f"http://prometheus-operated.{NAMESPACE}.svc:9090"
POD = (f"pod/prometheus-{NAME}-0", "--namespace", NAMESPACE)
NOTICED_S = 90.0
"""The operator sees a new API within a minute."""
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

    def follow(self, namespace: str, *, monitored: bool = True) -> None:
        """Wait until prometheus-operator has written that a namespace is scraped, or not, and let Prometheus do so.

        A running one would by itself look at a changed file within three minutes, or at once where inotify tells it.
        """
        until(
            lambda: (f"podMonitor/{namespace}/" in self._written()) == monitored,
            f"prometheus-operator writes what is scraped in {namespace}",
            within_s=NOTICED_S,
        )
        if (f"podMonitor/{namespace}/" in self._get("status/config")["yaml"]) != monitored:
            self._node.plane.kubectl("delete", *POD)
            self._node.plane.until_done("wait", "--for=condition=Ready", "--timeout=60s", *POD)

    def targets(self, namespace: str) -> list[Json]:
        """What it scrapes in a namespace, up or down."""
        found = self._get("targets?state=active")["activeTargets"]
        return [target for target in found if target["labels"].get("namespace") == namespace]

    def query(self, promql: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series that answers an instant query."""
        found = self._get(f"query?query={quote(promql, safe='')}")["result"]
        return [(item["metric"], float(item["value"][1])) for item in found]

    def _written(self) -> str:
        secret = self._node.plane.get("secret", f"prometheus-{NAME}", "--namespace", NAMESPACE)
        return gzip.decompress(base64.b64decode(secret["data"]["prometheus.yaml.gz"])).decode()

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
    node.plane.until_done(
        "wait", "--for=condition=Established", "--timeout=60s", *(f"--filename={crd}" for crd in crds)
    )
    apply_files(node, [manifest])
    available = ("wait", "--for=condition=Available", f"prometheus/{NAME}", "--namespace", NAMESPACE)
    kubectl(*available, "--timeout=110s")
    return Prometheus(node)
