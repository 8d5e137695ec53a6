"""Which TTFT target a request has: the SLO contract, as pure functions.

The first valid rule wins:

1. header `x-flowprefill-slo-class`: a class by name, with its own target;
2. a bare number: header `x-llm-d-slo-ttft-ms`, then `x-slo-ttft-ms` (milliseconds), then body
   `vllm_xargs.ttft_slo` (seconds). It keeps the class that rules 3 to 5 choose and replaces the target,
   clamped to that class's bounds, so that nobody buys the front of the queue with 1 ms;
3. header `x-llm-d-inference-objective` (or its alias): a class by name;
4. body `service_tier` through the configured mapping;
5. the default class.

A value that cannot be used is reported with a closed (source, reason) pair and falls through to the next
rule; it never fails a request. A client's own `arrival` is never read: clocks of two machines do not compare.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

HEADER_CLASS = "x-flowprefill-slo-class"
HEADERS_TTFT_MS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
HEADERS_OBJECTIVE = ("x-llm-d-inference-objective", "x-gateway-inference-objective")

Source = Literal[
    "class_header", "llmd_ttft_header", "ttft_header", "xargs", "objective_header", "service_tier"
]
Reason = Literal["empty", "not_a_number", "not_positive", "out_of_range", "conflicting", "unknown"]

SOURCES: tuple[Source, ...] = (
    "class_header",
    "llmd_ttft_header",
    "ttft_header",
    "xargs",
    "objective_header",
    "service_tier",
)
REASONS: tuple[Reason, ...] = (
    "empty",
    "not_a_number",
    "not_positive",
    "out_of_range",
    "conflicting",
    "unknown",
)

NEUTRAL_TIERS = frozenset({"auto", "default"})
"""Tiers that mean "no preference" in OpenAI's API; without a mapping they are not worth a count."""

_DECIMAL = re.compile(r"[0-9]{1,20}(\.[0-9]{1,9})?")
_NEGATIVE = re.compile(r"-[0-9]{1,20}(\.[0-9]{1,9})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClass:
    """One SLO class as the proxy uses it. Times are seconds; `objective` is a share in (0, 1)."""

    name: str
    ttft_s: float
    min_ttft_s: float
    max_ttft_s: float
    objective: float = 0.9
    weight: float = 1.0
    shed_when_infeasible: bool = False

    def __post_init__(self) -> None:
        assert 0 < self.min_ttft_s <= self.ttft_s <= self.max_ttft_s, f"bounds do not hold the target: {self}"

    def clamp(self, ttft_s: float) -> float:
        """The target nearest to `ttft_s` that this class allows, in seconds."""
        return min(max(ttft_s, self.min_ttft_s), self.max_ttft_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClasses:
    """The closed set of classes, the default among them, and the mapping of `service_tier` to names."""

    classes: Mapping[str, SloClass]
    default: str
    service_tiers: Mapping[str, str]

    def __post_init__(self) -> None:
        assert self.default in self.classes, (
            f"default class {self.default!r} is not among {sorted(self.classes)}"
        )

    @property
    def default_class(self) -> SloClass:
        return self.classes[self.default]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What was decided: the class, the target in seconds, and every value that could not be used."""

    slo_class: SloClass
    ttft_s: float
    invalid: tuple[tuple[Source, Reason], ...] = ()


def resolve(headers: Iterable[tuple[str, str]], body: Mapping[str, object], known: SloClasses) -> Slo:
    """The SLO of one request. `headers` are (lower-case name, value) pairs as they came, duplicates included."""
    invalid: list[tuple[Source, Reason]] = []
    values = _collect(headers)

    named = _class_by_name(values.get(HEADER_CLASS), "class_header", known, invalid)
    if named is not None:
        return Slo(slo_class=named, ttft_s=named.ttft_s, invalid=tuple(invalid))

    ttft_s = _bare_number(values, body, invalid)
    chosen = _class_of_later_rules(values, body, known, invalid)
    if ttft_s is None:
        return Slo(slo_class=chosen, ttft_s=chosen.ttft_s, invalid=tuple(invalid))
    return Slo(slo_class=chosen, ttft_s=chosen.clamp(ttft_s), invalid=tuple(invalid))


def _collect(headers: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    wanted = {HEADER_CLASS, *HEADERS_TTFT_MS, *HEADERS_OBJECTIVE}
    values: dict[str, list[str]] = {}
    for name, value in headers:
        if name in wanted:
            values.setdefault(name, []).append(value)
    return values


def _single(values: Sequence[str]) -> tuple[str, Reason | None]:
    """The one value of a header, stripped, and what is wrong with it (None: nothing)."""
    stripped = {value.strip() for value in values}
    if len(stripped) > 1:
        return "", "conflicting"
    value = stripped.pop()
    return value, None if value else "empty"


def _class_by_name(
    values: Sequence[str] | None, source: Source, known: SloClasses, invalid: list[tuple[Source, Reason]]
) -> SloClass | None:
    if values is None:
        return None
    name, reason = _single(values)
    if reason is None and name in known.classes:
        return known.classes[name]
    invalid.append((source, reason or "unknown"))
    return None


def _bare_number(
    values: Mapping[str, Sequence[str]], body: Mapping[str, object], invalid: list[tuple[Source, Reason]]
) -> float | None:
    """The first usable bare target in seconds, or None."""
    found: float | None = None
    sources: tuple[Source, Source] = ("llmd_ttft_header", "ttft_header")
    for header, source in zip(HEADERS_TTFT_MS, sources, strict=True):
        if header not in values:
            continue
        text, reason = _single(values[header])
        number = reason or _positive(text)
        if isinstance(number, str):
            invalid.append((source, number))
        elif found is None:
            found = number / 1000.0
    xargs = body.get("vllm_xargs")
    if isinstance(xargs, Mapping) and "ttft_slo" in xargs:
        number = _positive(xargs["ttft_slo"])
        if isinstance(number, str):
            invalid.append(("xargs", number))
        elif found is None:
            found = number
    return found


def _positive(value: object) -> float | Reason:
    """A positive finite number, or why there is none. Text may hold ASCII digits and one point only."""
    if isinstance(value, bool):
        return "not_a_number"
    if isinstance(value, str):
        text = value.strip()
        if not text:
            return "empty"
        if _NEGATIVE.fullmatch(text):
            return "not_positive"
        if not _DECIMAL.fullmatch(text):
            return "out_of_range" if text.isascii() and text.isdigit() else "not_a_number"
        number = float(text)
    elif isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:
            return "out_of_range"
        if not math.isfinite(number):
            return "out_of_range"
    else:
        return "not_a_number"
    return number if number > 0 else "not_positive"


def _class_of_later_rules(
    values: Mapping[str, Sequence[str]],
    body: Mapping[str, object],
    known: SloClasses,
    invalid: list[tuple[Source, Reason]],
) -> SloClass:
    for header in HEADERS_OBJECTIVE:
        named = _class_by_name(values.get(header), "objective_header", known, invalid)
        if named is not None:
            return named
    tier = body.get("service_tier")
    if tier is not None:
        name = known.service_tiers.get(tier) if isinstance(tier, str) else None
        if name is not None and name in known.classes:
            return known.classes[name]
        if not isinstance(tier, str) or tier not in NEUTRAL_TIERS:
            invalid.append(("service_tier", "unknown"))
    return known.default_class
