"""The proxy's metrics: the documented table is what it exposes; labels stay closed; series end."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowprefill.metrics.proxy import ProxyMetrics

README = Path(__file__).parents[3] / "serving" / "README.md"
HEADING = "### Proxy"
COMMON = {"service": "s", "model_name": "m"}
CLASSES = [("chat", 0.42, 0.99), ("batch", 20.0, 0.9)]


@pytest.fixture
def metrics() -> ProxyMetrics:
    made = ProxyMetrics(service="s", model_name="m")
    made.slo.configure(CLASSES)
    return made


def value(metrics: ProxyMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, COMMON | labels)


def test_the_readmes_table_is_what_the_proxy_exposes(metrics):
    part = README.read_text().split(HEADING)[1].split("\n#")[0]
    rows = {
        tuple(cell.strip() for cell in line.strip("|").split("|")[:3])
        for line in part.splitlines()
        if line.startswith("| `")
    }
    exposed = set()
    for collector in metrics.registry._collector_to_names:
        suffix = "_total" if collector._type == "counter" else ""
        labels = ", ".join(f"`{label}`" for label in collector._labelnames[len(COMMON) :]) or "-"
        exposed.add((f"`{collector._name}{suffix}`", collector._type, labels))
    assert rows == exposed
    assert all(name.startswith("`flowprefill_") for name, *_ in exposed)


def test_a_classs_own_target_is_a_bucket_edge_also_after_a_live_change(metrics):
    def first_token(target_s: float) -> None:
        metrics.slo.first_token(
            "chat", streaming=True, ttft_s=target_s, target_s=target_s, parts_s={"queue": target_s}
        )

    first_token(0.42)
    name = "flowprefill_request_ttft_seconds_bucket"
    assert value(metrics, name, slo_class="chat", streaming="true", le="0.42") == 1
    metrics.slo.configure([("chat", 0.77, 0.99)])
    first_token(0.77)
    assert value(metrics, name, slo_class="chat", streaming="true", le="0.77") == 1
    assert value(metrics, name, slo_class="chat", streaming="true", le="0.75") == 0


def test_a_class_that_is_not_configured_counts_as_other(metrics):
    metrics.slo.ended("from a client", code=200, outcome="ok", result="met")
    assert value(metrics, "flowprefill_requests_total", slo_class="other", code="200", outcome="ok") == 1


def test_attainment_series_are_there_before_the_first_request(metrics):
    for result in ("met", "missed"):
        assert value(metrics, "flowprefill_ttft_slo_requests_total", slo_class="batch", result=result) == 0


def test_series_of_classes_and_pods_that_are_gone_end(metrics):
    metrics.router.show(waiting={"chat": 1}, outstanding={("prefill", "p0"): 2}, endpoints={"prefill": 1})
    name = "flowprefill_proxy_outstanding_requests"
    assert value(metrics, name, role="prefill", pod="p0") == 2
    metrics.router.show(waiting={}, outstanding={("prefill", "p1"): 1}, endpoints={"prefill": 1})
    assert value(metrics, name, role="prefill", pod="p0") is None
    assert value(metrics, name, role="prefill", pod="p1") == 1
    assert value(metrics, "flowprefill_proxy_queue_requests", slo_class="chat") is None
    metrics.slo.configure(CLASSES[:1])
    assert value(metrics, "flowprefill_slo_objective_ratio", slo_class="batch") is None
    assert value(metrics, "flowprefill_slo_objective_ratio", slo_class="chat") == 0.99
