"""Metrics of prefill, decode and colocated pods. The table in serving/README.md lists every name.

The scheduler's metrics are fed on the scheduler thread, the others on the event loop's; prometheus_client locks
each child, so any thread may scrape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from flowprefill.metrics.family import Family
from flowprefill.metrics.scheduler import FAST_S, SchedulerMetrics

KV_FAILURES = (
    "unknown_request",
    "layout_mismatch",
    "wrong_blocks",
    "bad_message",
    "engine_failed",
    "connection_lost",
)


class KVTransferMetrics:
    """KV blocks that crossed the wire. On a decode pod `received_*` prove that prefills are not recomputed."""

    def __init__(self, family: Family) -> None:
        self._received_bytes = family.counter(
            "flowprefill_kv_transfer_received_bytes_total", "Bytes of KV blocks pulled from prefill pods."
        )
        self._received_tokens = family.counter(
            "flowprefill_kv_transfer_received_tokens_total",
            "Prompt tokens whose KV was pulled from prefill pods.",
        )
        self._sent_bytes = family.counter(
            "flowprefill_kv_transfer_sent_bytes_total", "Bytes of KV blocks sent to decode pods."
        )
        self._failures = family.counter(
            "flowprefill_kv_transfer_failures_total", "KV pulls that failed, by reason.", "reason"
        )
        self._ends = family.counter(
            "flowprefill_kv_transfer_holds_total",
            "Finished prefills whose KV was given back, by how the hold ended.",
            "end",
        )
        self._held = family.gauge(
            "flowprefill_kv_transfer_held_requests", "Finished prefills whose KV waits to be pulled."
        )
        self._pull_s = family.histogram(
            "flowprefill_kv_transfer_pull_seconds", "Time of a whole pull.", buckets=FAST_S
        )
        for reason in KV_FAILURES:
            self._failures(reason=reason)
        for end in ("pulled", "aborted", "expired"):
            self._ends(end=end)

    def received(self, num_bytes: int) -> None:
        self._received_bytes().inc(num_bytes)

    def pulled(self, num_tokens: int, seconds: float) -> None:
        """A pull is complete."""
        self._received_tokens().inc(num_tokens)
        self._pull_s().observe(seconds)

    def received_tokens(self, num_tokens: int) -> None:
        """KV of so many prompt tokens has come; how long it took is not known here."""
        self._received_tokens().inc(num_tokens)

    def sent(self, num_bytes: int) -> None:
        self._sent_bytes().inc(num_bytes)

    def failed(self, reason: str) -> None:
        assert reason in KV_FAILURES, reason
        self._failures(reason=reason).inc()

    def hold_ended(self, end: str) -> None:
        self._ends(end=end).inc()

    def held(self, num_requests: int) -> None:
        self._held().set(num_requests)


class PodMetrics:
    """What every pod says of itself."""

    def __init__(self, family: Family) -> None:
        self._requests = family.counter(
            "flowprefill_pod_requests_total", "HTTP requests answered by this pod's API port.", "code"
        )
        self._generation = family.gauge(
            "flowprefill_live_generation", "Generation of the live document in use."
        )
        self._live_errors = family.counter(
            "flowprefill_live_document_errors_total",
            "Live documents refused; the last good one stays in use.",
        )
        self._ready = family.gauge("flowprefill_pod_ready", "1 while the pod takes requests.")
        self._prompt_tokens = family.counter(
            "flowprefill_prompt_tokens_total", "Prompt tokens of requests whose prefill completed."
        )
        self._cached_tokens = family.counter(
            "flowprefill_kv_cached_tokens_total", "Prompt tokens that were in the prefix cache."
        )
        self._generated_tokens = family.counter(
            "flowprefill_generated_tokens_total", "Tokens generated for clients."
        )

    def answered(self, status: int) -> None:
        self._requests(code=str(status)).inc()

    def live_generation(self, generation: int) -> None:
        self._generation().set(generation)

    def live_document_refused(self) -> None:
        self._live_errors().inc()

    def ready(self, ready: bool) -> None:
        self._ready().set(int(ready))

    def prompt(self, num_tokens: int, num_cached: int) -> None:
        self._prompt_tokens().inc(num_tokens)
        self._cached_tokens().inc(num_cached)

    def generated(self, num_tokens: int) -> None:
        self._generated_tokens().inc(num_tokens)


class DecodeMetrics:
    """How full a decoder is, set at scrape time."""

    def __init__(self, family: Family) -> None:
        self._sequences = family.gauge(
            "flowprefill_decode_sequences", "Sequences in the decoder, by state.", "state"
        )
        self._steps = family.counter("flowprefill_decode_steps_total", "Decode steps run.")
        self._num_steps = 0

    def state(self, *, queued: int, filling: int, active: int, num_steps: int) -> None:
        self._sequences(state="queued").set(queued)
        self._sequences(state="filling").set(filling)
        self._sequences(state="active").set(active)
        self._steps().inc(num_steps - self._num_steps)
        self._num_steps = num_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """All metrics of one pod."""

    registry: CollectorRegistry
    pod: PodMetrics
    kv_transfer: KVTransferMetrics
    scheduler: SchedulerMetrics
    decode: DecodeMetrics


def engine_metrics(
    registry: CollectorRegistry, *, service: str, model_name: str, role: str, classes: Sequence[str]
) -> EngineMetrics:
    """The metrics of one pod, registered."""
    family = Family(registry, {"service": service, "model_name": model_name, "role": role})
    return EngineMetrics(
        registry=registry,
        pod=PodMetrics(family),
        kv_transfer=KVTransferMetrics(family),
        scheduler=SchedulerMetrics(family, classes),
        decode=DecodeMetrics(family),
    )
