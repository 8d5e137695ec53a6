"""SLO classes: which time to first token is promised to whom, and how often the promise must hold."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints

from flowprefill_crd.base import DNS_LABEL_PATTERN, ApiObject
from flowprefill_crd.rules import Rule, Rules, Unique

MAX_MILLISECONDS = 3_600_000

RESERVED_NAME = "other"
"""The value of the label slo_class for requests that belong to no class of the spec."""

Milliseconds = Annotated[int, Field(ge=1, le=MAX_MILLISECONDS)]

_OBJECTIVE = r"(5[0-9]|[6-9][0-9])([.][0-9]{1,3})?"

OBJECTIVE_RULE = Rule(
    message='use a percent from "50" to "99.999" with at most three decimals, as a string',
    cel=f"self.matches('^{_OBJECTIVE}$')",
    holds=lambda objective: re.fullmatch(_OBJECTIVE, objective) is not None,
    seen=lambda objective: str(objective),
)


class SloClass(ApiObject):
    """One promise: the time to first token for the requests of this class."""

    rules: ClassVar = (
        Rule(
            message=f"the name {RESERVED_NAME} stands for requests of no class in metrics; use another name",
            cel=f"self.name != '{RESERVED_NAME}'",
            holds=lambda c: c.name != RESERVED_NAME,
            field="name",
        ),
        Rule(
            message="minTtftMilliseconds is above ttftMilliseconds; use at most ttftMilliseconds",
            cel="!has(self.minTtftMilliseconds) || self.minTtftMilliseconds <= self.ttftMilliseconds",
            holds=lambda c: c.min_ttft_milliseconds is None or c.min_ttft_milliseconds <= c.ttft_milliseconds,
            field="minTtftMilliseconds",
            seen=lambda c: f"{c.min_ttft_milliseconds} above {c.ttft_milliseconds}",
        ),
        Rule(
            message="maxTtftMilliseconds is below ttftMilliseconds; use at least ttftMilliseconds",
            cel="!has(self.maxTtftMilliseconds) || self.maxTtftMilliseconds >= self.ttftMilliseconds",
            holds=lambda c: c.max_ttft_milliseconds is None or c.max_ttft_milliseconds >= c.ttft_milliseconds,
            field="maxTtftMilliseconds",
            seen=lambda c: f"{c.max_ttft_milliseconds} below {c.ttft_milliseconds}",
        ),
    )

    name: Annotated[str, StringConstraints(pattern=DNS_LABEL_PATTERN, min_length=1, max_length=32)]
    """Name of the class: in the header x-flowprefill-slo-class, in metrics and in the status. Applied live."""

    ttft_milliseconds: Milliseconds
    """Promised time to first token in milliseconds, from the complete request at the proxy to the first
    token leaving it. Applied live."""

    tbt_milliseconds: Milliseconds | None = None
    """Wanted time between two tokens of an answer in milliseconds; no target when absent. Applied live."""

    objective: Annotated[str, StringConstraints(max_length=8), Rules(OBJECTIVE_RULE)] = "90"
    """Percent of requests that must meet ttftMilliseconds, a decimal string such as "99.9", from 50 to
    99.999. Alerts and the error budget follow from it. Applied live."""

    min_ttft_milliseconds: Milliseconds | None = None
    """Smallest target that a request may ask for in milliseconds; half of ttftMilliseconds when absent.
    Applied live."""

    max_ttft_milliseconds: Milliseconds | None = None
    """Largest target that a request may ask for in milliseconds; four times ttftMilliseconds when absent.
    Applied live."""

    weight: Annotated[int, Field(ge=1, le=1000)] = 1
    """Value of a request of this class against others, for the policies srpt and moore-hodgson only.
    Applied live."""

    default: bool = False
    """The class of requests that name none. Exactly one class is the default; a single class is it in any
    case. Applied live."""

    shed_when_infeasible: bool = False
    """Reject a request at once (429) when its target can no longer be met, rather than serve it late.
    Applied live."""

    service_tiers: Annotated[
        tuple[Annotated[str, StringConstraints(pattern=r"^[-_a-z0-9]+$", min_length=1, max_length=32)], ...],
        Field(max_length=8),
        Unique(),
    ] = ()
    """Values of the OpenAI field service_tier that select this class, each in at most one class. Applied
    live."""

    @property
    def resolved_min_ttft_milliseconds(self) -> int:
        """Smallest target that a request may ask for."""
        return self.min_ttft_milliseconds or max(1, self.ttft_milliseconds // 2)

    @property
    def resolved_max_ttft_milliseconds(self) -> int:
        """Largest target that a request may ask for."""
        return self.max_ttft_milliseconds or min(MAX_MILLISECONDS, self.ttft_milliseconds * 4)

    @property
    def objective_ratio(self) -> float:
        """The objective as a ratio of 1: 0.999 for "99.9"."""
        return float(Decimal(self.objective) / 100)


def _tiers_are_unique(classes: tuple[SloClass, ...]) -> bool:
    tiers = [tier for c in classes for tier in c.service_tiers]
    return len(tiers) == len(set(tiers))


DEFAULT_RULE = Rule(
    message="exactly one class must say default: true; a single class is the default in any case",
    cel="self.size() < 2 || self.filter(c, c.default).size() == 1",
    holds=lambda classes: len(classes) < 2 or sum(c.default for c in classes) == 1,
    seen=lambda classes: f"{sum(c.default for c in classes)} of {len(classes)}",
)

TIERS_RULE = Rule(
    message="a service tier is mapped to two classes; each tier may appear in one class",
    cel="self.all(c, !has(c.serviceTiers) || c.serviceTiers.all(t, "
    "self.filter(d, has(d.serviceTiers) && t in d.serviceTiers).size() == 1))",
    holds=_tiers_are_unique,
)

SloClasses = Annotated[
    tuple[SloClass, ...], Field(min_length=1, max_length=16), Unique("name"), Rules(DEFAULT_RULE, TIERS_RULE)
]
