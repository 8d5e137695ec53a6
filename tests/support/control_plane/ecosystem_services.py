"""Small services for what scales, scrapes and kills them: simulated engines, ready in seconds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.control_plane.node import Node
from support.control_plane.node_pods import restricted_namespace
from support.control_plane.node_service import NodeService

Json = dict[str, Any]

MODEL = "smollm2-135m-instruct"
POLL_S = 0.2
REQUESTS = {"prefill": "100m", "decode": "200m", "proxy": "300m"}
"""Of CPU: two revisions with three prefill pods each fit on two cores."""


def small(name: str, *, args: tuple[str, ...] = (), **roles: Json) -> Json:
    """A service with one pod a role, but for what `roles` says of prefill, decode or proxy."""
    spec: Json = {
        "model": {"uri": f"embedded://{MODEL}"},
        "engine": {"type": "simulated", "args": list(args), "kvCacheTokens": 131072},
        "sloClasses": [
            {"name": "chat", "ttftMilliseconds": 5000, "objective": "95", "default": True},
            {"name": "document", "ttftMilliseconds": 60000, "objective": "90"},
        ],
    }
    for role in ("prefill", "decode", "proxy"):
        own = roles.get(role, {"replicas": 1})
        resources = {"requests": {"cpu": REQUESTS[role], "memory": "128Mi"}}
        spec[role] = {"resources": resources} | own
    return {
        "apiVersion": "flowprefill.io/v1alpha1",
        "kind": "FlowPrefillService",
        "metadata": {"name": name},
        "spec": spec,
    }


@contextmanager
def applied(node: Node, body: Json) -> Iterator[NodeService]:
    """A service in a namespace of its own, just applied."""
    with restricted_namespace(node) as namespace:
        service = NodeService(node, namespace, body["metadata"]["name"])
        service.apply(body)
        try:
            yield service
        finally:
            service.delete()


def prefill_deployments(service: NodeService) -> dict[str, int]:
    """Pods that each prefill Deployment of the service asks for, by its name; those being deleted left out."""
    selector = f"flowprefill.io/service={service.name},flowprefill.io/role=prefill"
    found = service.node.plane.get("--namespace", service.namespace, "deployments", "-l", selector)
    return {
        item["metadata"]["name"]: item["spec"]["replicas"]
        for item in found["items"]
        if "deletionTimestamp" not in item["metadata"]
    }


class FewestSeen:
    """Fewest ready prefill pods, and fewest that a Deployment asked for, while this was watched."""

    def __init__(self, service: NodeService) -> None:
        self.asked = 10_000
        self.ready = 10_000
        self._service = service
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FewestSeen:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        self.asked = min([self.asked, *prefill_deployments(self._service).values()])
        self.ready = min(self.ready, sum(map(_is_ready, self._service.pods("prefill"))))


def _is_ready(pod: Json) -> bool:
    found = {c["type"]: c["status"] for c in pod["status"].get("conditions", ())}
    return found.get("Ready") == "True"
