"""What a proxy counts of its dealings with the control plane: discovery of pods, and round trips that it is asked for."""

from __future__ import annotations

from flowprefill.metrics.family import Family


class ControlMetrics:
    """Nothing here is about a client's request."""

    def __init__(self, family: Family) -> None:
        self._failures = family.counter(
            "flowprefill_proxy_discovery_failures_total",
            "Tries to read EndpointSlices that failed, by reason; the last endpoints stay in use.",
            "reason",
        )
        self._up = family.gauge(
            "flowprefill_proxy_discovery_up", "1 while changes of the pods' EndpointSlices are followed."
        )
        self._round_trips = family.counter(
            "flowprefill_proxy_round_trips_total",
            "One-token requests through a revision that the operator asked for, by result.",
            "result",
        )
        for result in ("ok", "failed"):
            self._round_trips(result=result)

    def discovery_failed(self, trouble: str) -> None:
        """A list or a watch failed; `trouble` is one of a closed set."""
        self._failures(reason=trouble).inc()

    def discovery_up(self, up: bool) -> None:
        self._up().set(up)

    def round_trip(self, *, ok: bool) -> None:
        self._round_trips(result="ok" if ok else "failed").inc()
