"""What one check finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether something holds, why in one word, and why in a sentence.

    What does not hold is on its way, unless `stalled`: it will not change without somebody, or `asked_for`: it is as the
    spec wants it.
    """

    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""
    stalled: bool = False

    @property
    def asked_for(self) -> bool:
        return self.status != "True" and self.reason in ASKED_FOR


def holds(reason: str, message: str = "") -> Verdict:
    return Verdict(status="True", reason=reason, message=message)


def pending(reason: str, message: str) -> Verdict:
    """Not yet, and on its way."""
    return Verdict(status="False", reason=reason, message=message)


def stalled(reason: str, message: str) -> Verdict:
    """No, until somebody does something."""
    return Verdict(status="False", reason=reason, message=message, stalled=True)


ASKED_FOR = ("Paused", "ScaledToZero")
"""Reasons of what does not hold because the spec wants it so."""


def asked_for(
    reason: Literal["Paused", "ScaledToZero"],
    message: str,
    *,
    status: Literal["False", "Unknown"] = "False",
) -> Verdict:
    """Not so, and nobody waits for it."""
    return Verdict(status=status, reason=reason, message=message)
