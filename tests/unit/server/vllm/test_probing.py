"""How many requests vLLM has, by its own metrics."""

from __future__ import annotations

from flowprefill.server.vllm.probing import num_in_flight

# As vLLM 0.32.0 writes it.
METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
"""


def test_running_and_waiting_requests_count_once() -> None:
    assert num_in_flight(METRICS) == 5


def test_metrics_that_do_not_say_are_no_zero() -> None:
    assert num_in_flight("") is None
    assert num_in_flight("# HELP vllm:num_requests_running Number\n") is None
