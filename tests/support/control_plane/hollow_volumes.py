"""Volumes for claims that no provisioner of this control plane would ever fill."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def volume_for(claim: Json) -> Json | None:
    """A PersistentVolume reserved for a pending claim, or None when the claim needs none."""
    meta, spec = claim["metadata"], claim["spec"]
    if claim.get("status", {}).get("phase") != "Pending" or "volumeName" in spec:
        return None
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"hollow-{meta['uid']}"},
        "spec": {
            "capacity": spec["resources"]["requests"],
            "accessModes": spec["accessModes"],
            "storageClassName": spec.get("storageClassName", ""),
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]},
            "hostPath": {"path": f"/nonexistent/{meta['uid']}"},
        },
    }
