"""A vLLM request as our scheduler knows it."""

from __future__ import annotations

from typing import Any

from flowprefill.engines.vllm_engine.accounting import as_int
from flowprefill.request import Request
from flowprefill.server.slo import slo_of
from flowprefill_crd import LiveConfig

_MARK = "\0"  # no request id of an HTTP client has one


def attempt_id(vllm_id: str, attempt: int) -> str:
    """The scheduler's id of a vLLM request; one that has to enter anew gets another, since ids are used once."""
    return vllm_id if attempt == 0 else f"{vllm_id}{_MARK}{attempt}"


def vllm_id(request_id: str) -> str:
    """The vLLM request behind a scheduler's id."""
    return request_id.partition(_MARK)[0]


def as_request(request: Any, live: LiveConfig, *, now_s: float, wall_s: float, attempt: int = 0) -> Request:
    """The request with its targets; `wall_s` is the wall clock's time at `now_s`.

    vLLM stamps arrivals by the wall clock, in the API server's process. A stamp in the future counts as now.
    """
    params = request.sampling_params
    xargs = (params.extra_args or {}) if params is not None else {}
    slo = slo_of(xargs, live)
    arrival_s = now_s - max(wall_s - request.arrival_time, 0.0)
    cached = not request.skip_reading_prefix_cache
    return Request(
        request_id=attempt_id(request.request_id, attempt),
        num_prompt_tokens=request.num_tokens,
        arrival_s=arrival_s,
        deadline_s=arrival_s + slo.budget_s,
        ttft_slo_s=slo.ttft_s,
        slo_class=slo.slo_class,
        weight=slo.weight,
        shed_when_infeasible=slo.shed_when_infeasible,
        prefix_hashes=tuple(as_int(value) for value in request.block_hashes) if cached else (),
    )
