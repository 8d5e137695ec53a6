"""What vLLM is busy with, by its own metrics."""

from __future__ import annotations

import pytest

from flowprefill.server.vllm.probing import EngineLoad, engine_load

# As vLLM 0.32.0 writes it, of two engines.
METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 128.0
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:external_prefix_cache_hits_total counter
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 96.0
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 40.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 42.0
vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 900.0
"""


def test_each_number_is_read_once_and_over_all_engines() -> None:
    load = engine_load(METRICS)
    assert load == EngineLoad(
        running=4, waiting=2, num_generated_tokens=128, num_steps=42, num_received_tokens=96
    )
    assert load is not None
    assert load.in_flight == 6


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# HELP vllm:num_requests_running Number\n",
        "vllm:num_requests_running 1\n",
        "vllm:num_requests_running{",
    ],
)
def test_metrics_that_do_not_say_are_no_zero(text: str) -> None:
    assert engine_load(text) is None
