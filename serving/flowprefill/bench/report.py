"""Attainment, goodput and latency summaries: the one place where they are computed.

Replays and simulations both hand over `RequestRecord`s, so their numbers mean the same thing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request of a run, as its client saw it. Times are seconds; `at_s` counts from the run's start.

    `ttft_s` is None when no token came (`error` says why): such a request misses its target.
    """

    request_id: str
    slo_class: str
    at_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_slo_s: float
    ttft_s: float | None
    end_s: float | None
    error: str | None = None
    text: str = ""

    @property
    def met(self) -> bool:
        """Did the first token leave within the target?"""
        return self.ttft_s is not None and self.ttft_s <= self.ttft_slo_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Attainment:
    """A share of requests with its 95 % Wilson score interval."""

    met: int
    total: int
    ratio: float
    low: float
    high: float


def attainment(records: Iterable[RequestRecord]) -> Attainment:
    """Share of requests that met their TTFT target; every request counts. Raises ValueError on none."""
    outcomes = [record.met for record in records]
    if not outcomes:
        raise ValueError("attainment of no requests is undefined; give at least one record")
    met = sum(outcomes)
    interval = binomtest(met, len(outcomes)).proportion_ci(confidence_level=0.95, method="wilson")
    return Attainment(
        met=met,
        total=len(outcomes),
        ratio=met / len(outcomes),
        low=float(interval.low),
        high=float(interval.high),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSummary:
    """What one SLO class got. TTFT percentiles are over requests that got a token; None when none did."""

    slo_class: str
    ttft_slo_s: float
    attainment: Attainment
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    mean_prompt_tokens: float
    failed: int


def quantile(values: Sequence[float], q: float) -> float | None:
    """The q-quantile by linear interpolation, or None of nothing."""
    return float(np.quantile(np.asarray(values, dtype=float), q)) if len(values) else None


def summarise(records: Sequence[RequestRecord]) -> tuple[ClassSummary, ...]:
    """One summary per class, the tightest target first."""
    summaries = []
    for _, slo_class in sorted({(record.ttft_slo_s, record.slo_class) for record in records}):
        members = [record for record in records if record.slo_class == slo_class]
        ttfts = [record.ttft_s for record in members if record.ttft_s is not None]
        summaries.append(
            ClassSummary(
                slo_class=slo_class,
                ttft_slo_s=members[0].ttft_slo_s,
                attainment=attainment(members),
                ttft_p50_s=quantile(ttfts, 0.5),
                ttft_p99_s=quantile(ttfts, 0.99),
                mean_prompt_tokens=float(np.mean([record.num_prompt_tokens for record in members])),
                failed=sum(record.error is not None for record in members),
            )
        )
    return tuple(summaries)


def goodput_per_s(records: Sequence[RequestRecord]) -> float:
    """Requests per second that met their target, over the time from first send to last end."""
    ends = [record.end_s for record in records if record.end_s is not None]
    if not ends:
        return 0.0
    duration_s = max(ends) - min(record.at_s for record in records)
    return sum(record.met for record in records) / duration_s if duration_s > 0 else 0.0
