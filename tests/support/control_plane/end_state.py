"""What a service has come to, without what differs between two runs of the same thing."""

from __future__ import annotations

import json
from typing import Any

from support.control_plane.operated import Operated

Json = dict[str, Any]

SERVER_SET = ("creationTimestamp", "generation", "managedFields", "resourceVersion", "uid", "selfLink")
ALLOCATED = ("clusterIP", "clusterIPs")
COUNTED = "deployment.kubernetes.io/revision"
"""Annotation that a Deployment's own controller counts up with every change of the template."""

HASH = "flowprefill.io/applied"
"""Annotation with a hash over names and uids, which differ."""


def end_state(cluster: Operated, namespace: str, name: str) -> dict[tuple[str, str], Json]:
    """Every object that the service owns, by kind and name: all that was asked for, nothing that was allocated.

    The namespace and the service's uid are replaced by words, so that the states of two services in two namespaces
    can be compared.
    """
    uid = cluster.service(namespace, name)["metadata"]["uid"]
    return {
        key: _plain(item, namespace=namespace, uid=uid)
        for key, item in cluster.owned(namespace, uid).items()
        if "deletionTimestamp" not in item["metadata"]
    }


def _plain(item: Json, *, namespace: str, uid: str) -> Json:
    text = json.dumps(item).replace(uid, "UID").replace(namespace, "NAMESPACE")
    plain: Json = json.loads(text)
    meta = {key: value for key, value in plain["metadata"].items() if key not in SERVER_SET}
    meta["annotations"] = {
        key: value for key, value in meta.get("annotations", {}).items() if key not in (COUNTED, HASH)
    }
    meta["managers"] = sorted({entry["manager"] for entry in plain["metadata"].get("managedFields", ())})
    plain["metadata"] = meta
    plain.pop("status", None)
    for field in ALLOCATED:
        plain.get("spec", {}).pop(field, None)
    if isinstance(plain.get("data"), dict) and "objects" in plain["data"]:
        plain["data"]["objects"] = sorted(
            plain["data"]["objects"], key=lambda o: (o["kind"], o["metadata"]["name"])
        )
    plain.pop("revision", None)
    return plain
