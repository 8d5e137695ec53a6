"""Engine metrics: the documented table is what pods expose, and scheduler metrics follow from events."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from flowprefill.metrics.engine import EngineMetrics, engine_metrics
from flowprefill.request import Request
from flowprefill.scheduling.actions import Finish, Preempt, Submit, Task, TaskItem, WithdrawPreempt
from flowprefill.scheduling.events import Arrival, Cancelled, Completed, Failed, Parked, Tick

README = Path(__file__).parents[3] / "serving" / "README.md"
HEADING = "### Prefill, decode and colocated pods"
COMMON = {"service": "s", "model_name": "m", "role": "prefill"}


@pytest.fixture
def metrics() -> EngineMetrics:
    return engine_metrics(
        CollectorRegistry(), service="s", model_name="m", role="prefill", classes=["chat", "document"]
    )


def value(metrics: EngineMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, COMMON | labels)


def test_the_readmes_table_is_what_pods_expose(metrics: EngineMetrics) -> None:
    part = README.read_text().split(HEADING)[1].split("\n#")[0]
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in part.splitlines()
        if line.startswith("| `")
    ]
    exposed = []
    for collector in metrics.registry._collector_to_names:
        suffix = "_total" if collector._type == "counter" else ""  # type: ignore[attr-defined]
        labels = collector._labelnames[len(COMMON) :]  # type: ignore[attr-defined]
        exposed.append(
            (
                f"`{collector._name}{suffix}`",  # type: ignore[attr-defined]
                collector._type,  # type: ignore[attr-defined]
                ", ".join(f"`{label}`" for label in labels) or "-",
                collector._documentation,  # type: ignore[attr-defined]
            )
        )
    assert sorted(rows) == sorted(exposed)
    assert all(name.startswith("`flowprefill_") for name, *_ in exposed)


def request(request_id: str, slo_class: str = "chat", **changes: object) -> Request:
    values: dict[str, object] = {
        "request_id": request_id,
        "num_prompt_tokens": 100,
        "arrival_s": 0.0,
        "deadline_s": 10.0,
        "ttft_slo_s": 10.0,
        "slo_class": slo_class,
    }
    return Request(**(values | changes))  # type: ignore[arg-type]


def submit(task_id: int, *request_ids: str, predicted_s: float = 2.0) -> Submit:
    items = tuple(
        TaskItem(request_id=i, start=0, num_tokens=100, block_ids=(1,), completes=True) for i in request_ids
    )
    return Submit(task=Task(task_id=task_id, items=items, predicted_s=predicted_s))


def test_waiting_requests_are_counted_by_class_and_unknown_classes_together(metrics: EngineMetrics) -> None:
    arrivals = (request("a"), request("b", "document"), request("c", "new"), request("d", "newer"))
    metrics.scheduler.observe(Arrival(requests=arrivals), (), 0.0)
    assert value(metrics, "flowprefill_queue_requests", slo_class="chat") == 1
    assert value(metrics, "flowprefill_queue_requests", slo_class="other") == 2
    metrics.scheduler.observe(Tick(), (submit(1, "a", "c"),), 3.0)
    assert value(metrics, "flowprefill_queue_requests", slo_class="chat") == 0
    assert value(metrics, "flowprefill_queue_requests", slo_class="other") == 1
    finish = Finish(request_id="b", outcome="cancelled")
    metrics.scheduler.observe(Cancelled(request_id="b"), (finish,), 4.0)
    assert value(metrics, "flowprefill_queue_requests", slo_class="document") == 0
    # a and c left with deadline 10 - now 3 - predicted 2 = 5 seconds of slack each.
    assert value(metrics, "flowprefill_queue_slack_seconds_bucket", le="3.0") == 0
    assert value(metrics, "flowprefill_queue_slack_seconds_bucket", le="10.0") == 2


def test_a_class_that_goes_takes_its_series_with_it(metrics: EngineMetrics) -> None:
    metrics.scheduler.set_classes(["chat"])
    assert value(metrics, "flowprefill_queue_requests", slo_class="document") is None
    assert value(metrics, "flowprefill_queue_requests", slo_class="chat") == 0


def test_blocking_is_the_time_from_the_asking_event_to_the_yield(metrics: EngineMetrics) -> None:
    scheduler = metrics.scheduler
    scheduler.observe(Arrival(requests=(request("a"),)), (Preempt(task_id=1, ticket=1),), 5.0)
    scheduler.observe(Parked(task_id=1, ticket=1), (), 5.25)
    assert value(metrics, "flowprefill_preemption_blocking_seconds_sum") == 0.25
    assert value(metrics, "flowprefill_prefill_preemptions_total") == 1
    # A task that ends before it parks yields as well, but was not preempted.
    scheduler.observe(Arrival(requests=(request("b"),)), (Preempt(task_id=2, ticket=2),), 6.0)
    scheduler.observe(Completed(task_id=2, executed_s=1.0), (), 6.5)
    assert value(metrics, "flowprefill_preemption_blocking_seconds_sum") == 0.75
    assert value(metrics, "flowprefill_prefill_preemptions_total") == 1
    # A pause that was taken back blocks nobody.
    scheduler.observe(Arrival(requests=(request("c"),)), (Preempt(task_id=3, ticket=3),), 7.0)
    scheduler.observe(Cancelled(request_id="c"), (WithdrawPreempt(task_id=3, ticket=3),), 7.1)
    scheduler.observe(Parked(task_id=3, ticket=3), (), 9.0)
    assert value(metrics, "flowprefill_preemption_blocking_seconds_count") == 2


def test_prediction_errors_are_signed_predicted_less_executed(metrics: EngineMetrics) -> None:
    scheduler = metrics.scheduler
    scheduler.observe(Tick(), (submit(1, "a", predicted_s=2.0),), 0.0)
    scheduler.observe(Completed(task_id=1, executed_s=2.5), (submit(2, "b", predicted_s=1.0),), 2.5)
    assert value(metrics, "flowprefill_ttft_prediction_error_seconds_bucket", le="-1.0") == 0
    assert value(metrics, "flowprefill_ttft_prediction_error_seconds_bucket", le="-0.3") == 1
    scheduler.observe(Failed(task_id=2, error="x"), (), 3.0)
    scheduler.observe(Completed(task_id=2, executed_s=9.0), (), 12.0)
    assert value(metrics, "flowprefill_prefill_seconds_count") == 1


def test_rounds_are_counted_by_event(metrics: EngineMetrics) -> None:
    metrics.scheduler.observe(Tick(), (), 0.0)
    assert value(metrics, "flowprefill_scheduler_rounds_total", event="tick") == 1
    assert value(metrics, "flowprefill_scheduler_rounds_total", event="completion") == 0


def test_a_waiting_request_is_infeasible_once_its_time_does_not_suffice(metrics: EngineMetrics) -> None:
    metrics.scheduler.observe(Arrival(requests=(request("a"), request("b", deadline_s=100.0))), (), 0.0)
    # 1 s a pass, 0.02 s a token, 0.0002 s a squared token: 100 tokens take 1 + 2 + 2 = 5 s.
    prediction = (1.0, 0.02, 0.0002, 0.0004)
    for now_s, expected in ((4.9, 0), (5.1, 1), (95.1, 2)):
        metrics.scheduler.count_infeasible(now_s, prediction)
        assert value(metrics, "flowprefill_queue_infeasible_requests") == expected
