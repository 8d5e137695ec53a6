"""Names and label values that are valid for every accepted name of a service."""

from __future__ import annotations

import re

from flowprefill_crd.labels import label_value, shortened

__all__ = ["MAX_NAME", "child_name", "label_value"]

MAX_NAME = 50
"""Longest name of an object. Leaves room for what Kubernetes appends to it in the names of pods and slices."""

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def child_name(service: str, *suffixes: str) -> str:
    """`service-suffix-...`, a DNS-1035 label of at most 50 characters.

    A service's name may have dots, start with a digit or have up to 253 characters. Where it does not fit as it is,
    it is made to fit and a hash of the whole name is put behind it, so that two services never share a child.
    """
    tail = "".join(f"-{suffix}" for suffix in suffixes)
    room = MAX_NAME - len(tail)
    if _DNS_1035.fullmatch(service) and len(service) <= room:
        return service + tail
    return f"{shortened(service, room)}{tail}"
