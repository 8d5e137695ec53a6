"""Labels, names of ports and paths that planned objects and their readers agree on."""

from __future__ import annotations

from typing import Literal

Role = Literal["prefill", "decode", "colocated", "proxy"]

SERVICE = "flowprefill.io/service"
"""Which FlowPrefillService an object belongs to (its name, shortened to a valid label value)."""
ROLE = "flowprefill.io/role"
REVISION = "flowprefill.io/revision"
OWNER = "flowprefill.io/owner-uid"
"""Uid of the service that an object was planned for."""
ROLLOUT = "flowprefill.io/rollout"
"""Annotation of a worker Deployment: how its revision replaces the one before, `Surge` or `Recreate`."""

API_PORT = "api"
ADMIN_PORT = "admin"
KV_PORT = "kv"

CONFIG_KEY = "config.json"
LIVE_KEY = "live.json"
ENDPOINTS_KEY = "endpoints.json"
