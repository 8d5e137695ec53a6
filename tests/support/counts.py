"""What discovery told to be counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counted:
    failures: Counter[str] = field(default_factory=Counter)
    up: bool = False

    def discovery_failed(self, trouble: str) -> None:
        self.failures[trouble] += 1

    def discovery_up(self, up: bool) -> None:
        self.up = up
