"""What one check finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether something holds, why in one word, and why in a sentence. `stalled`: it will not change without somebody."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""
    stalled: bool = False


def holds(reason: str, message: str = "") -> Verdict:
    return Verdict(status="True", reason=reason, message=message)


def pending(reason: str, message: str) -> Verdict:
    """Not yet, and on its way."""
    return Verdict(status="False", reason=reason, message=message)


def stalled(reason: str, message: str) -> Verdict:
    """No, until somebody does something."""
    return Verdict(status="False", reason=reason, message=message, stalled=True)


def unknown(reason: str, message: str) -> Verdict:
    return Verdict(status="Unknown", reason=reason, message=message)
