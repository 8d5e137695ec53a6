"""metrics-server beside the kubelet of a node: what `kubectl top` and autoscalers on CPU use ask."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from support.control_plane.daemon import Daemon
from support.control_plane.ecosystem_assets import ecosystem_program
from support.control_plane.node import Node
from support.control_plane.node_network import BRIDGE_ADDRESS

API = "v1beta1.metrics.k8s.io"
PORT = 4443
META = {"name": "metrics-server", "namespace": "kube-system"}


@contextmanager
def metrics_server(node: Node, folder: Path) -> Iterator[None]:
    """Pods' use of CPU and memory, measured every 10 s, the shortest time that metrics-server accepts."""
    kubeconfig = node.plane.kubeconfig
    argv = [
        *node.prefix,
        str(ecosystem_program("metrics-server")),
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        f"--secure-port={PORT}",
        f"--cert-dir={folder / 'certificates'}",
        "--kubelet-insecure-tls",
        "--kubelet-preferred-address-types=InternalIP",
        "--metric-resolution=10s",
        "--kubelet-request-timeout=5s",
    ]
    objects = json.dumps({"apiVersion": "v1", "kind": "List", "items": _objects()})
    server = Daemon("metrics-server", argv, folder / "metrics-server.log")
    node.plane.kubectl("apply", "-f", "-", stdin=objects)
    try:
        server.start(lambda: node.plane.kubectl("top", "node", check=False).returncode == 0)
        yield
    finally:
        node.plane.kubectl("delete", "-f", "-", stdin=objects)
        server.stop()


def _objects() -> list[Mapping[str, object]]:
    """Its API, in front of the process."""
    service: Mapping[str, object] = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": META,
        "spec": {"ports": [{"name": "https", "port": 443, "targetPort": PORT}]},
    }
    endpoints: Mapping[str, object] = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": META | {"labels": {"kubernetes.io/service-name": META["name"]}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [BRIDGE_ADDRESS], "conditions": {"ready": True}}],
        "ports": [{"name": "https", "port": PORT}],
    }
    api: Mapping[str, object] = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": API},
        "spec": {
            "group": "metrics.k8s.io",
            "version": "v1beta1",
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
            "service": META,
        },
    }
    return [service, endpoints, api]
