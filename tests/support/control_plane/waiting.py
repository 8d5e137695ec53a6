"""Waiting for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

POLL_S = 0.1


def until(look: Callable[[], Found | None], what: str, *, within_s: float = 60.0) -> Found:
    """Look until something true is there, and return it; fails after `within_s` with what was there last."""
    end_s = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < end_s, f"not within {within_s:.0f} s: {what}; at last {found!r}"
        time.sleep(POLL_S)
    return found
