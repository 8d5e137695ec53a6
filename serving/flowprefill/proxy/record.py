"""What is remembered of one client request until it is counted, once, at its end."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from flowprefill.metrics.proxy import ProxyMetrics
from flowprefill.proxy.attainment import Attainment
from flowprefill.proxy.exchange import Timing
from flowprefill.proxy.outcome import CLIENT_LEFT, Ended, account
from flowprefill.proxy.slo import Slo

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Record:
    """One client request. Times on the proxy's clock; `arrival_s` is when its body was complete."""

    request_id: str
    api: str
    arrival_s: float | None = None
    slo: Slo | None = None
    streaming: bool = False
    status: int | None = None
    broken: bool = False
    ttft_s: float | None = None
    timing: Timing | None = None
    num_tokens: int = 0

    def first_token(self, timing: Timing, now_s: float) -> None:
        """The request's first content token has left; later calls change nothing."""
        assert self.arrival_s is not None
        if self.ttft_s is None:
            self.ttft_s = now_s - self.arrival_s
            self.timing = timing


@dataclass(slots=True, kw_only=True)
class Ledger:
    """Counts records: metrics for Prometheus, attainment for the operator, a log line when asked for."""

    metrics: ProxyMetrics
    attainment: Attainment
    logs_requests: bool = False

    def close(self, record: Record, now_s: float) -> None:
        """Count a request that has ended. Called once for each."""
        status = record.status if record.status is not None else CLIENT_LEFT
        if record.slo is None or record.arrival_s is None:
            self.metrics.slo.ended(
                "", code=status, outcome="cancelled" if status == CLIENT_LEFT else "error", result=None
            )
            return
        name = record.slo.slo_class.name
        ended = Ended(
            status=status,
            target_s=record.slo.ttft_s,
            after_s=now_s - record.arrival_s,
            ttft_s=record.ttft_s,
            broken=record.broken,
        )
        counted = account(ended)
        self.metrics.slo.ended(name, code=status, outcome=counted.outcome, result=counted.result)
        if counted.result is not None:
            self.attainment.count(self.metrics.slo.known(name), counted.result, now_s)
        if record.ttft_s is not None and record.timing is not None:
            self.metrics.slo.first_token(
                name,
                streaming=record.streaming,
                ttft_s=record.ttft_s,
                target_s=record.slo.ttft_s,
                parts_s=record.timing.parts_s(),
            )
        level = logging.INFO if self.logs_requests else logging.DEBUG
        if log.isEnabledFor(level):
            fields = {
                "request_id": record.request_id,
                "slo_class": name,
                "status": status,
                "outcome": counted.outcome,
                "slo": counted.result,
                "target_s": record.slo.ttft_s,
                "ttft_s": record.ttft_s,
                "total_s": round(now_s - record.arrival_s, 6),
            }
            log.log(level, "request ended", extra=fields)
