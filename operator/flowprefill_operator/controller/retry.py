"""When a pass is repeated that could not bring everything about. Pure: the time is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowprefill_operator.apply import Failure
from flowprefill_operator.status.failures import of_failure

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 60.0

Reason = tuple[str, str, str]
"""Resource and name of an object, and why it is not as wanted, in one word. Not the API server's sentence, which may be
another each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """What one service's last pass could not bring about, and when it is tried again.

    `due_s` is on the monotonic clock; `pause_s` is what lay before it. `news` are the failures that the pass before did
    not have.
    """

    generation: int
    reasons: frozenset[Reason]
    pause_s: float
    due_s: float
    news: tuple[Failure, ...]


def next_retry(
    known: Retry | None, *, generation: int, failures: Sequence[Failure], now_s: float
) -> Retry | None:
    """The next try after a pass with these failures; None when there are none.

    The same refusals of the same spec are tried again after 5 s, 10 s, 20 s and so on, up to a minute. What
    heals by itself (an API server that does not answer, an object that is being deleted) keeps the first pause.
    """
    if not failures:
        return None
    reasons = {_reason(failure): failure for failure in failures}
    old = known if known is not None and known.generation == generation else None
    news = tuple(failure for reason, failure in reasons.items() if old is None or reason not in old.reasons)
    pause_s, due_s = FIRST_PAUSE_S, now_s + FIRST_PAUSE_S
    if old is not None and old.reasons == reasons.keys() and _need_somebody(failures):
        pause_s, due_s = old.pause_s, old.due_s
        if now_s >= due_s:  # not a pass that an event has brought before the pause was over
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            due_s = now_s + pause_s
    return Retry(generation=generation, reasons=frozenset(reasons), pause_s=pause_s, due_s=due_s, news=news)


def _reason(failure: Failure) -> Reason:
    return failure.kind.resource, failure.name, of_failure(failure).reason


def _need_somebody(failures: Sequence[Failure]) -> bool:
    return all(of_failure(failure).stalled for failure in failures)
