"""What the operator counts about itself."""

from __future__ import annotations

from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info


class OperatorMetrics:
    """Metrics of one operator process, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix = "flowprefill_operator"
        self.reconciles = Counter(
            f"{prefix}_reconcile", "Passes over a service", ["result"], registry=self.registry
        )
        self.duration = Histogram(
            f"{prefix}_reconcile_duration_seconds",
            "Time of one pass over a service",
            registry=self.registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )
        self.errors = Counter(
            f"{prefix}_reconcile_errors",
            "Objects that a pass could not bring about, by reason",
            ["error_type"],
            registry=self.registry,
        )
        self.writes = Counter(f"{prefix}_writes", "Objects written or deleted", registry=self.registry)
        self.status_writes = Counter(f"{prefix}_status_writes", "Statuses written", registry=self.registry)
        self.services = Gauge(
            f"{prefix}_services", "Known services by their condition Ready", ["ready"], registry=self.registry
        )
        self.queued = Gauge(
            f"{prefix}_queue_services", "Services that wait for a pass", registry=self.registry
        )
        self.resyncs = Counter(
            f"{prefix}_resyncs", "Looks at everything, by result", ["result"], registry=self.registry
        )
        self.missed = Counter(
            f"{prefix}_missed_changes",
            "Changes that a look at everything found before a watch told of them",
            registry=self.registry,
        )
        self.leader = Gauge(
            f"{prefix}_leader", "1 while this process is the one at work", registry=self.registry
        )
        Info(f"{prefix}_build", "Release of the operator", registry=self.registry).info(
            {"version": version("flowprefill")}
        )
