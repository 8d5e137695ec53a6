"""How one request ended, for `requests_total` and for the SLO. Pure.

An SLO event is a request whose TTFT promise was kept or broken; `met + missed` is the number of SLO events.

| the request                                         | outcome   | SLO                              |
| --------------------------------------------------- | --------- | -------------------------------- |
| was answered                                        | ok        | met when TTFT <= target          |
| was refused for what it says (4xx but 429)          | error     | not an event                     |
| was shed or found the queue full (429)              | shed      | missed                           |
| failed or ran out of time (5xx)                     | error     | missed                           |
| broke off after its answer had begun                | error     | missed                           |
| lost its client after the first token               | cancelled | met when TTFT <= target          |
| lost its client before the first token, in time     | cancelled | not an event                     |
| lost its client before the first token, after it    | cancelled | missed                           |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["ok", "error", "shed", "cancelled"]
Result = Literal["met", "missed"]

OUTCOMES: tuple[Outcome, ...] = ("ok", "error", "shed", "cancelled")
CLIENT_LEFT = 499
"""The status that stands for "the client went away": never sent, only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a request. Times in seconds since the request was complete at the proxy.

    `status` is the HTTP status sent, or `CLIENT_LEFT`. `ttft_s` is None when no token left the proxy. `broken`
    says that the answer began and did not end properly.
    """

    status: int
    target_s: float
    after_s: float
    ttft_s: float | None = None
    broken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What is counted for a request. `result` None: not an SLO event."""

    outcome: Outcome
    result: Result | None


def account(ended: Ended) -> Account:
    """The table above."""
    if ended.status == CLIENT_LEFT:
        return Account(outcome="cancelled", result=_of_client_that_left(ended))
    if ended.status == 429:
        return Account(outcome="shed", result="missed")
    if 400 <= ended.status < 500:
        return Account(outcome="error", result=None)
    if ended.status >= 500 or ended.broken:
        return Account(outcome="error", result="missed")
    assert ended.ttft_s is not None, "an answered request has a time to first token"
    return Account(outcome="ok", result="met" if ended.ttft_s <= ended.target_s else "missed")


def _of_client_that_left(ended: Ended) -> Result | None:
    if ended.ttft_s is not None:
        return "met" if ended.ttft_s <= ended.target_s else "missed"
    return None if ended.after_s <= ended.target_s else "missed"
