"""The proxy's metrics. Written by the proxy, read by Prometheus, never by a decision.

Labels are closed: classes come from the live configuration (anything else counts as `other`), codes are the
statuses the proxy sends, pods are removed with their endpoint. A class's own target is a bucket edge of
`request_ttft_seconds`, so attainment can be read off the histogram exactly; when a live change brings a new edge, the
histogram starts anew, which Prometheus treats as a counter reset.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram

from flowprefill.metrics.control import ControlMetrics
from flowprefill.metrics.family import Family

BASE_BUCKETS_S = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    3.0,
    5.0,
    7.5,
    10.0,
    15.0,
    30.0,
    60.0,
)
RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0, 16.0)
OVERHEAD_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
SLACK_BUCKETS_S = (
    -60.0,
    -30.0,
    -10.0,
    -5.0,
    -2.0,
    -1.0,
    -0.5,
    -0.1,
    0.0,
    0.1,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
    60.0,
)
LENGTH_RATIO_BUCKETS = (0.25, 0.5, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 2.0, 4.0)
LEGS = ("prefill", "decode")
OTHER = "other"


class SloMetrics:
    """Requests, SLO events and the parts of TTFT, by class."""

    def __init__(self, family: Family, registry: CollectorRegistry, common: dict[str, str]) -> None:
        self._registry = registry
        self._common = common
        self._classes: frozenset[str] = frozenset()
        self._edges_s: tuple[float, ...] = ()
        self._ttft_s: Histogram | None = None
        self._requests = family.counter(
            "flowprefill_requests_total",
            "Requests by HTTP status and outcome.",
            "slo_class",
            "code",
            "outcome",
        )
        self._events = family.counter(
            "flowprefill_ttft_slo_requests_total",
            "SLO events: requests whose promised TTFT was met or missed.",
            "slo_class",
            "result",
        )
        self._ratio = family.histogram(
            "flowprefill_ttft_to_slo_ratio",
            "TTFT over the request's own target.",
            "slo_class",
            buckets=RATIO_BUCKETS,
        )
        self._parts = {
            part: family.histogram(
                f"flowprefill_request_{part}_seconds", text, "slo_class", buckets=BASE_BUCKETS_S
            )
            for part, text in (
                ("queue", "Part of TTFT: from the complete request to its last dispatch."),
                ("prefill", "Part of TTFT: the prefill leg."),
                (
                    "kv_transfer",
                    "Part of TTFT: from the prefill leg's answer to the decode leg's first bytes.",
                ),
                ("first_decode", "Part of TTFT: from there to the first content token."),
            )
        }
        self._objective = family.gauge(
            "flowprefill_slo_objective_ratio", "Promised share of SLO events that are met.", "slo_class"
        )
        self._target_s = family.gauge("flowprefill_slo_ttft_seconds", "Promised TTFT.", "slo_class")

    def configure(self, classes: Iterable[tuple[str, float, float]]) -> None:
        """Take over classes as (name, target in seconds, objective ratio); series of classes that are gone end."""
        known = {name: (target_s, objective) for name, target_s, objective in classes}
        for gone in self._classes - set(known):
            self._objective.forget(slo_class=gone)
            self._target_s.forget(slo_class=gone)
        self._classes = frozenset(known)
        for name, (target_s, objective) in known.items():
            self._objective(slo_class=name).set(objective)
            self._target_s(slo_class=name).set(target_s)
            for result in ("met", "missed"):
                self._events(slo_class=name, result=result)
        edges_s = tuple(sorted({*BASE_BUCKETS_S, *(target_s for target_s, _ in known.values())}))
        if edges_s != self._edges_s:
            self._edges_s = edges_s
            self._renew_ttft()

    def known(self, slo_class: str) -> str:
        """The class as a label: itself, or `other` when the configuration does not have it (any more)."""
        return slo_class if slo_class in self._classes else OTHER

    def ended(self, slo_class: str, *, code: int, outcome: str, result: str | None) -> None:
        """A request's one end; `result` None is no SLO event."""
        name = self.known(slo_class)
        self._requests(slo_class=name, code=str(code), outcome=outcome).inc()
        if result is not None:
            self._events(slo_class=name, result=result).inc()

    def first_token(
        self, slo_class: str, *, streaming: bool, ttft_s: float, target_s: float, parts_s: dict[str, float]
    ) -> None:
        """A first token left; `parts_s` (queue, prefill, kv_transfer, first_decode) sum to `ttft_s`."""
        name = self.known(slo_class)
        assert self._ttft_s is not None, "configure comes first"
        self._ttft_s.labels(**self._common, slo_class=name, streaming=str(streaming).lower()).observe(ttft_s)
        self._ratio(slo_class=name).observe(ttft_s / target_s)
        for part, seconds in parts_s.items():
            self._parts[part](slo_class=name).observe(seconds)

    def _renew_ttft(self) -> None:
        if self._ttft_s is not None:
            self._registry.unregister(self._ttft_s)
        self._ttft_s = Histogram(
            "flowprefill_request_ttft_seconds",
            "First content token leaving the proxy minus request fully received.",
            [*self._common, "slo_class", "streaming"],
            registry=self._registry,
            buckets=self._edges_s,
        )


class RouterMetrics:
    """What the proxy does besides: queue, dispatch, legs, pods, documents."""

    def __init__(self, family: Family) -> None:
        self._slo_invalid = family.counter(
            "flowprefill_slo_header_invalid_total",
            "SLO values of clients that could not be used.",
            "source",
            "reason",
        )
        self._overhead_s = family.histogram(
            "flowprefill_router_overhead_seconds",
            "Time in the proxy's own code before a request waits: checking it, its SLO, its length.",
            buckets=OVERHEAD_BUCKETS_S,
        )
        self._waiting = family.gauge(
            "flowprefill_proxy_queue_requests", "Requests waiting at the proxy.", "slo_class"
        )
        self._slack_s = family.histogram(
            "flowprefill_proxy_dispatch_slack_seconds",
            "Predicted slack of requests as they leave the queue; negative: the target is lost.",
            "slo_class",
            buckets=SLACK_BUCKETS_S,
        )
        self._dispatches = family.counter(
            "flowprefill_proxy_dispatches_total", "Requests sent to a pod, by why it was their turn.", "kind"
        )
        self._failures = family.counter("flowprefill_proxy_leg_failures_total", "Legs that failed.", "leg")
        self._retries = family.counter("flowprefill_proxy_leg_retries_total", "Legs tried again.", "leg")
        self._kv_releases = family.counter(
            "flowprefill_proxy_kv_releases_total",
            "Finished prefills given back because nobody will pull them.",
        )
        self._length_ratio = family.histogram(
            "flowprefill_proxy_prompt_tokens_ratio",
            "Estimated over real prompt tokens.",
            buckets=LENGTH_RATIO_BUCKETS,
        )
        self._outstanding = family.gauge(
            "flowprefill_proxy_outstanding_requests", "Requests of this proxy at a pod.", "role", "pod"
        )
        self._endpoints = family.gauge("flowprefill_proxy_endpoints", "Pods that may get requests.", "role")
        self._generation = family.gauge(
            "flowprefill_live_generation", "Generation of the live document in use."
        )
        self._refused = family.counter(
            "flowprefill_documents_refused_total",
            "Documents refused; the last good one stays in use.",
            "document",
        )
        for leg in LEGS:
            self._failures(leg=leg)
            self._retries(leg=leg)
        for document in ("live", "endpoints"):
            self._refused(document=document)
        self._shown: frozenset[tuple[str, str]] = frozenset()
        self._shown_classes: frozenset[str] = frozenset()
        self._shown_roles: frozenset[str] = frozenset()

    def slo_invalid(self, source: str, reason: str) -> None:
        self._slo_invalid(source=source, reason=reason).inc()

    def overhead(self, seconds: float) -> None:
        self._overhead_s().observe(seconds)

    def dispatched(self, slo_class: str, kind: str, slack_s: float) -> None:
        self._dispatches(kind=kind).inc()
        self._slack_s(slo_class=slo_class).observe(slack_s)

    def leg_failed(self, leg: str) -> None:
        self._failures(leg=leg).inc()

    def leg_retried(self, leg: str) -> None:
        self._retries(leg=leg).inc()

    def kv_released(self) -> None:
        self._kv_releases().inc()

    def prompt_length(self, ratio: float) -> None:
        self._length_ratio().observe(ratio)

    def live_generation(self, generation: int) -> None:
        self._generation().set(generation)

    def document_refused(self, document: str) -> None:
        self._refused(document=document).inc()

    def show(
        self,
        *,
        waiting: dict[str, int],
        outstanding: dict[tuple[str, str], int],
        endpoints: dict[str, int],
    ) -> None:
        """Set the gauges at scrape time; series of pods and classes that are gone end.

        `waiting` by class, `outstanding` by (role, pod), `endpoints` by role.
        """
        for name in self._shown_classes - set(waiting):
            self._waiting.forget(slo_class=name)
        self._shown_classes = frozenset(waiting)
        for name, count in waiting.items():
            self._waiting(slo_class=name).set(count)
        for role, pod in self._shown - set(outstanding):
            self._outstanding.forget(role=role, pod=pod)
        self._shown = frozenset(outstanding)
        for (role, pod), count in outstanding.items():
            self._outstanding(role=role, pod=pod).set(count)
        for role in self._shown_roles - set(endpoints):
            self._endpoints.forget(role=role)
        self._shown_roles = frozenset(endpoints)
        for role, count in endpoints.items():
            self._endpoints(role=role).set(count)


class ProxyMetrics:
    """All metrics of one proxy, in a registry of their own."""

    def __init__(self, *, service: str, model_name: str) -> None:
        self.registry = CollectorRegistry()
        common = {"service": service, "model_name": model_name}
        family = Family(self.registry, common)
        self.slo = SloMetrics(family, self.registry, common)
        self.router = RouterMetrics(family)
        self.control = ControlMetrics(family)
