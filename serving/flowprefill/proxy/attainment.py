"""SLO attainment per class over sliding windows, for the operator's status. Bounded memory, no metric read back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from flowprefill.proxy.outcome import Result

WINDOWS_S: dict[str, float] = {"5m": 300.0, "1h": 3600.0}
BUCKET_S = 10.0


@dataclass(slots=True)
class _Bucket:
    start_s: float
    met: int = 0
    missed: int = 0


@dataclass(slots=True)
class _ClassCounts:
    met: int = 0
    missed: int = 0
    buckets: deque[_Bucket] = field(
        default_factory=lambda: deque(maxlen=int(max(WINDOWS_S.values()) / BUCKET_S) + 1)
    )


class Attainment:
    """Counts SLO events by class: since start, and over each of `WINDOWS_S` with 10 s resolution."""

    def __init__(self) -> None:
        self._classes: dict[str, _ClassCounts] = {}

    def count(self, slo_class: str, result: Result, now_s: float) -> None:
        counts = self._classes.setdefault(slo_class, _ClassCounts())
        start_s = now_s - now_s % BUCKET_S
        if not counts.buckets or counts.buckets[-1].start_s < start_s:
            counts.buckets.append(_Bucket(start_s))
        bucket = counts.buckets[-1]
        if result == "met":
            counts.met += 1
            bucket.met += 1
        else:
            counts.missed += 1
            bucket.missed += 1

    def report(self, known: Iterable[str], now_s: float) -> dict[str, object]:
        """`{class: {met, missed, windows: {"5m": {met, missed}, ...}}}` for the known classes, in their order."""
        return {name: self._of(self._classes.get(name, _ClassCounts()), now_s) for name in known}

    @staticmethod
    def _of(counts: _ClassCounts, now_s: float) -> dict[str, object]:
        windows = {}
        for label, length_s in WINDOWS_S.items():
            inside = [b for b in counts.buckets if b.start_s + BUCKET_S > now_s - length_s]
            windows[label] = {"met": sum(b.met for b in inside), "missed": sum(b.missed for b in inside)}
        return {"met": counts.met, "missed": counts.missed, "windows": windows}
