"""Requests whose prompt is computed and whose answer goes on: each step over them is one task of the scheduler."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from flowprefill.execution.pacing import StepPacer
from flowprefill.request import Request

STEP_PREFIX = "\0decode-step/"


@dataclass(slots=True, kw_only=True)
class _Answer:
    last_token_s: float
    tbt_slo_s: float


class DecodeSteps:
    """Says when the next step is to enter and what it is. At most one is outstanding."""

    def __init__(self) -> None:
        self._answers: dict[str, _Answer] = {}
        self._pacer = StepPacer()
        self._ids = itertools.count()
        self._outstanding: str | None = None
        self.enter_s: float | None = None
        """When to look again if nothing happens before; None when nothing is to be awaited."""

    def __len__(self) -> int:
        return len(self._answers)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._answers

    def longest_waiting(self, count: int) -> tuple[str, ...]:
        """vLLM's ids of so many answers, the oldest last token first."""
        return tuple(sorted(self._answers, key=lambda i: self._answers[i].last_token_s)[:count])

    def add(self, request_id: str, *, now_s: float, tbt_slo_s: float) -> None:
        """The request has its first token."""
        self._answers[request_id] = _Answer(last_token_s=now_s, tbt_slo_s=tbt_slo_s)

    def discard(self, request_id: str) -> None:
        """The answer has ended, or starts over."""
        self._answers.pop(request_id, None)

    def got_token(self, request_ids: Iterable[str], now_s: float) -> None:
        """These answers have grown."""
        for request_id in request_ids:
            if answer := self._answers.get(request_id):
                answer.last_token_s = now_s

    def is_step(self, request_id: str) -> bool:
        """Whether the scheduler's id is that of a step."""
        return request_id.startswith(STEP_PREFIX)

    def ended(self, now_s: float) -> None:
        """The outstanding step has its outcome."""
        self._outstanding = None
        self._pacer.ended(now_s)

    def next_step(self, now_s: float, *, at_once: bool, most: int) -> Request | None:
        """The step to hand to the scheduler now, over at most `most` answers; None when it is not time."""
        self.enter_s = None
        if self._outstanding is not None:
            return None
        targets = ((answer.last_token_s, answer.tbt_slo_s) for answer in self._answers.values())
        timing = self._pacer.timing(targets, now_s, at_once=at_once)
        if timing is None:
            return None
        if timing.enter_s > now_s:
            self.enter_s = timing.enter_s
            return None
        self._pacer.entered(now_s)
        self._outstanding = f"{STEP_PREFIX}{next(self._ids)}"
        return Request(
            request_id=self._outstanding,
            num_prompt_tokens=min(len(self._answers), most),
            arrival_s=now_s,
            deadline_s=self._pacer.deadline_s(timing, now_s),
            ttft_slo_s=timing.tightest_s,
            slo_class="decode",
            kind="decode",
        )
