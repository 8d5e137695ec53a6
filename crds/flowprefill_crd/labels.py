"""Labels and port names by which a service's objects are found; the operator writes them, proxies select by them."""

from __future__ import annotations

import hashlib

SERVICE = "flowprefill.io/service"
"""Which FlowPrefillService an object belongs to: `label_value` of its name."""
ROLE = "flowprefill.io/role"
REVISION = "flowprefill.io/revision"

API_PORT = "api"
ADMIN_PORT = "admin"

_HASH_DIGITS = 8


def label_value(name: str) -> str:
    """`name` as a label value: at most 63 characters, hashed when cut."""
    return name if len(name) <= 63 else shortened(name, 63)


def shortened(name: str, room: int) -> str:
    """`name` in at most `room` characters of a DNS-1035 label, with a hash of the whole name behind it."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_DIGITS]
    readable = name.replace(".", "-")
    if not readable[0].isalpha():
        readable = f"s{readable}"
    return f"{readable[: room - _HASH_DIGITS - 1].rstrip('-')}-{digest}"
