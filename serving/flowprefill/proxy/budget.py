"""The part of a TTFT target that is left for the prefill pod.

remaining budget = target - time already spent - p90 of what follows prefill on the chosen decode pod (KV transfer
and first decode step). What travels to a pod is this number of seconds, never a clock reading. It is negative for a
request that is late already, so that a pod's ageing counts the time spent here.
"""

from __future__ import annotations

from collections import deque

from sortedcontainers import SortedList

FLOOR_S = 0.001
"""What follows prefill is never taken to be shorter than this, whatever the samples say."""


class SlidingQuantile:
    """A quantile of the last `window` observations. O(log window) per observation, bounded memory."""

    def __init__(self, *, quantile: float = 0.9, window: int = 256) -> None:
        self._quantile = quantile
        self._recent: deque[float] = deque(maxlen=window)
        self._sorted: SortedList[float] = SortedList()

    def __len__(self) -> int:
        return len(self._recent)

    def observe(self, value: float) -> None:
        if len(self._recent) == self._recent.maxlen:
            self._sorted.remove(self._recent[0])
        self._recent.append(value)
        self._sorted.add(value)

    def value(self) -> float:
        """The smallest observation with at least the quantile's share of observations at or below it."""
        count = len(self._sorted)
        assert count, "no observation yet"
        index = max(-(-int(self._quantile * 1000) * count // 1000) - 1, 0)
        return float(self._sorted[index])


class FollowUp:
    """Seconds from a prefill leg's answer to the first token, p90, for each decode pod.

    A pod with fewer than `min_samples` observations takes the p90 over all pods, and before there are that many
    of those, `prior_s`.
    """

    def __init__(self, *, prior_s: float = 0.05, min_samples: int = 8, window: int = 256) -> None:
        self._prior_s = prior_s
        self._min_samples = min_samples
        self._window = window
        self._all = SlidingQuantile(window=window)
        self._pods: dict[str, SlidingQuantile] = {}

    def observe(self, pod: str, seconds: float) -> None:
        self._all.observe(seconds)
        self._pods.setdefault(pod, SlidingQuantile(window=self._window)).observe(seconds)

    def p90_s(self, pod: str) -> float:
        for samples in (self._pods.get(pod), self._all):
            if samples is not None and len(samples) >= self._min_samples:
                return max(samples.value(), FLOOR_S)
        return self._prior_s

    def forget(self, pod: str) -> None:
        """Drop the samples of a pod that is gone."""
        self._pods.pop(pod, None)


def remaining_budget_s(*, target_s: float, spent_s: float, follow_s: float) -> float:
    """Seconds the prefill pod has from now on; negative when the target is lost already."""
    return target_s - spent_s - follow_s
