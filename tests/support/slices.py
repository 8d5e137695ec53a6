"""EndpointSlices as the API server stores them, made from the endpoints that they are to describe."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from flowprefill.wire import Endpoint

NAMESPACE = "serving"
SERVICE = "demo"
MANAGED_BY = "test.flowprefill.io"
"""Not the name of the cluster's own controller, which would delete slices that it did not make."""


def slices_of(endpoints: Sequence[Endpoint], *, service: str = SERVICE) -> list[dict[str, Any]]:
    """One slice for each role of each revision, as the headless Services of a FlowPrefillService get them."""

    def kind(endpoint: Endpoint) -> tuple[str, str]:
        return endpoint.role, endpoint.revision

    return [
        slice_of(list(members), role=role, revision=revision, service=service)
        for (role, revision), members in groupby(sorted(endpoints, key=kind), key=kind)
    ]


def slice_of(
    members: Sequence[Endpoint], *, role: str, revision: str = "", service: str = SERVICE, suffix: str = "0"
) -> dict[str, Any]:
    """A slice with these pods; all have the same ports."""
    labels = {
        "flowprefill.io/service": service,
        "flowprefill.io/role": role,
        "kubernetes.io/service-name": f"{service}-{role}-{revision}".rstrip("-"),
        "endpointslice.kubernetes.io/managed-by": MANAGED_BY,
    }
    if revision:
        labels["flowprefill.io/revision"] = revision
    ports = [("api", members[0].address), ("admin", members[0].admin)] if members else []
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{service}-{role}-{revision or 'all'}-{suffix}",
            "namespace": NAMESPACE,
            "labels": labels,
            "creationTimestamp": datetime.fromtimestamp(members[0].created_s if members else 0.0, UTC)
            .isoformat()
            .replace("+00:00", "Z"),
        },
        "addressType": "IPv4",
        "ports": [
            {"name": name, "port": int(address.rpartition(":")[2]), "protocol": "TCP"}
            for name, address in ports
        ],
        "endpoints": [
            {
                "addresses": [member.address.rpartition(":")[0]],
                "conditions": {
                    "ready": member.ready and not member.terminating,
                    "serving": member.ready,
                    "terminating": member.terminating,
                },
                "targetRef": {"kind": "Pod", "name": member.name, "namespace": NAMESPACE},
            }
            for member in members
        ],
    }


def pod(name: str, role: str = "prefill", revision: str = "r1", **fields: Any) -> Endpoint:
    """An endpoint with the ports that the operator gives pods of its role."""
    last = sum(name.encode()) % 200 + 1
    found = {"address": f"10.1.0.{last}:8000", "admin": f"10.1.0.{last}:9000", "created_s": 1000.0} | fields
    return Endpoint(name=name, role=role, revision=revision, **found)
