"""How long to wait before a container starts again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential delays in seconds: 0, `initial_s`, twice that, ... at most `maximum_s`.

    A run of at least `reset_after_s` starts the series again. Kubernetes' own series (10 s to 5 minutes) is made
    for fleets; here somebody is waiting.
    """

    initial_s: float = 1.0
    maximum_s: float = 60.0
    reset_after_s: float = 120.0

    def delay_s(self, failures: int) -> float:
        """The delay after the `failures`-th end in a row, counted from 1: the first restart is at once."""
        if failures <= 1:
            return 0.0
        return float(min(self.initial_s * 2.0 ** min(failures - 2, 32), self.maximum_s))
