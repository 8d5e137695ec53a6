"""Small workloads for a real node, as the restricted pod security standard wants them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from support.control_plane.node import Node

PORT = 8080

_numbers = itertools.count(1)


@contextmanager
def restricted_namespace(node: Node) -> Iterator[str]:
    """The name of a namespace that admits what the restricted standard admits; it goes away some time afterwards."""
    name = f"case-{next(_numbers)}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    found = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    node.plane.kubectl("apply", "-f", "-", stdin=json.dumps(found))
    node.plane.until_done("get", "serviceaccount", "default", "--namespace", name)
    try:
        yield name
    finally:
        node.plane.kubectl("delete", "namespace", name, "--wait=false")


def pod_spec(image: str, command: Sequence[str]) -> dict[str, object]:
    """A pod of one container that may write nowhere but to /tmp."""
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 1,
        "securityContext": {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        "containers": [
            {
                "name": "main",
                "image": image,
                "imagePullPolicy": "IfNotPresent",
                "command": list(command),
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
            }
        ],
    }


def web_server(name: str, image: str, *, replicas: int) -> Mapping[str, object]:
    """A Deployment of pods that answer HTTP, and its Service; both as one List."""
    labels = {"app": name}
    spec = pod_spec(image, ["python3", "-m", "http.server", str(PORT), "--directory", "/tmp"])
    containers = spec["containers"]
    assert isinstance(containers, list)
    containers[0]["readinessProbe"] = {"httpGet": {"path": "/", "port": PORT}, "periodSeconds": 1}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": labels, "ports": [{"port": PORT}]},
    }
    return {"apiVersion": "v1", "kind": "List", "items": [deployment, service]}
