"""When the next decode step of a pod that prefills as well is to enter the scheduler, and by when it is due.

A step is due one TBT target after the oldest of its sequences' last tokens: much sooner than a long prompt, so steps one right
after the other would never let it run. While prompts are outstanding the next step therefore enters only when half of its
time is gone, or earlier where steps take long (1.5 times their recent length before the deadline); the time between is the
prompts'. With no prompt there, or with a sequence that has no token yet, it enters at once. A step that cannot be in time any
more is due one target from now: a policy that puts lost deadlines last would else leave it behind every prompt there is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PACE_MARGIN = 1.5
"""A paced step enters at least this many times the recent length of steps before its deadline."""

PACE_SHARE = 0.5
"""And at least this part of its target before it, which is what a running prompt may take to reach a point."""

_RECENT = 0.2  # weight of the latest step in their recent length


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """When a step is to enter, when it is due, and the tightest TBT target among its sequences, in seconds."""

    enter_s: float
    due_s: float
    tightest_s: float


class StepPacer:
    """Keeps the recent length of decode steps, from entering the scheduler to their outcome."""

    def __init__(self) -> None:
        self._recent_s: float | None = None
        self._entered_s = 0.0

    def entered(self, now_s: float) -> None:
        """A step enters the scheduler."""
        self._entered_s = now_s

    def ended(self, now_s: float) -> None:
        """The step that entered last has its outcome."""
        took_s = now_s - self._entered_s
        before_s = took_s if self._recent_s is None else self._recent_s
        self._recent_s = before_s + _RECENT * (took_s - before_s)

    def timing(
        self, targets: Iterable[tuple[float, float]], now_s: float, *, at_once: bool
    ) -> StepTiming | None:
        """The next step over sequences given as (time of the last token, TBT target); None without sequences.

        `at_once` says that nobody else wants the time, or that a sequence has no token yet.
        """
        known = tuple(targets)
        if not known:
            return None
        due_s = min(last_s + tbt_s for last_s, tbt_s in known)
        tightest_s = min(tbt_s for _, tbt_s in known)
        if at_once or self._recent_s is None:
            enter_s = now_s
        else:
            enter_s = max(now_s, due_s - max(PACE_MARGIN * self._recent_s, PACE_SHARE * tightest_s))
        return StepTiming(enter_s=enter_s, due_s=due_s, tightest_s=tightest_s)

    def deadline_s(self, timing: StepTiming, now_s: float) -> float:
        """The deadline of a step that enters now: one target from now when its own cannot be met any more."""
        if timing.due_s - now_s < (self._recent_s or 0.0):
            return now_s + timing.tightest_s
        return timing.due_s
