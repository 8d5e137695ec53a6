"""A prediction of prefill time for pods that report none, learned from their answers. Pure."""

from __future__ import annotations

from statistics import median

from flowprefill.proxy.placement import UNTRAINED, Coefficients

MIN_SAMPLES = 5
MIN_TOKENS = 16
WINDOW = 64


class LearnedRate:
    """Seconds per prompt token, the median over legs that had a pod to themselves.

    A straight line through the origin: too little for slack to the millisecond, enough to tell long prompts from
    short ones and a busy pod from an idle one. Legs that waited behind others say nothing of the pod's speed.
    """

    def __init__(self) -> None:
        self._samples: list[float] = []

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A leg of `num_tokens` new tokens took this long, alone on its pod from start to end."""
        if num_tokens >= MIN_TOKENS and seconds > 0:
            self._samples = [*self._samples[1 - WINDOW :], seconds / num_tokens]

    @property
    def coefficients(self) -> Coefficients:
        if len(self._samples) < MIN_SAMPLES:
            return UNTRAINED
        return (0.0, median(self._samples), 0.0, 0.0)
