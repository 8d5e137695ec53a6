"""Labels, names of ports and paths that planned objects and their readers agree on."""

from __future__ import annotations

from typing import Literal

from flowprefill_crd.labels import ADMIN_PORT, API_PORT, REVISION, ROLE, SERVICE

__all__ = [
    "ADMIN_PORT",
    "API_PORT",
    "COMMIT_KEY",
    "CONFIG_KEY",
    "ENDPOINTS_KEY",
    "KV_PORT",
    "LIVE_KEY",
    "OWNER",
    "PROFILER",
    "REVISION",
    "ROLE",
    "ROLLOUT",
    "SERVICE",
    "PodRole",
    "Role",
]

Role = Literal["prefill", "decode", "colocated", "proxy"]
PodRole = Role | Literal["profiler"]
"""The label ROLE of any pod of a service: those that serve, and the one that measures prefill times."""

PROFILER: Literal["profiler"] = "profiler"

OWNER = "flowprefill.io/owner-uid"
"""Uid of the service that an object was planned for."""
ROLLOUT = "flowprefill.io/rollout"
"""Annotation of a worker Deployment: how its revision replaces the one before, `Surge` or `Recreate`."""

KV_PORT = "kv"

COMMIT_KEY = "commit"
CONFIG_KEY = "config.json"
LIVE_KEY = "live.json"
ENDPOINTS_KEY = "endpoints.json"
