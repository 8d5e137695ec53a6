"""What a test needs beyond Python: present, promised, or a reason to skip."""

from __future__ import annotations

import os

import pytest


def promised() -> frozenset[str]:
    """The capabilities in FLOWPREFILL_REQUIRE, a comma-separated list such as `helm,torch`."""
    return frozenset(
        name.strip() for name in os.environ.get("FLOWPREFILL_REQUIRE", "").split(",") if name.strip()
    )


def require(capability: str, available: bool, reason: str) -> None:
    """Go on when the capability is available; otherwise fail where it is promised, and skip elsewhere.

    `reason` says what is missing and how to get it.
    """
    if available:
        return
    if capability in promised():
        pytest.fail(
            f"{capability} is promised by FLOWPREFILL_REQUIRE but is not available: {reason}", pytrace=False
        )
    pytest.skip(f"needs {capability}: {reason}")
