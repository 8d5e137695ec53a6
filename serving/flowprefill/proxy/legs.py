"""What the two legs of a request say, as pure functions of the client's request.

The prefill leg asks for one token and for the prompt's KV to be kept; the decode leg is the client's request with
the prefill leg's `kv_transfer_params`. Both are plain OpenAI requests with the fields vLLM defines, so stock
`vllm serve` pairs understand them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flowprefill.openai.headers import REQUEST_ID_HEADER, end_to_end
from flowprefill.wire import XARG_BUDGET_S, XARG_CLASS, XARG_DECODE_MAX_TOKENS, XARG_TARGET_S

Body = Mapping[str, Any]  # Any: JSON of the client, forwarded with the fields we do not know

KV_PARAMS = "kv_transfer_params"
XARGS = "vllm_xargs"

FORWARDED_HEADERS = frozenset({"authorization", "baggage", "traceparent", "tracestate", "user-agent"})
"""What of a client's headers reaches a pod. An allow-list: routing and SLO headers from outside never do."""

CLIENT_XARGS_DROPPED = frozenset(
    {"arrival", "tbt_slo", XARG_BUDGET_S, XARG_TARGET_S, XARG_CLASS, XARG_DECODE_MAX_TOKENS}
)
"""`vllm_xargs` that only the proxy may set; `arrival` is a reading of the client's clock and means nothing here."""


def prefill_body(
    body: Body, *, chat: bool, budget_s: float, target_s: float, slo_class: str
) -> dict[str, Any]:
    """The prefill leg: one token, not streamed, one choice, KV kept for a decode pod."""
    leg = {key: value for key, value in body.items() if key not in ("stream_options", "best_of", KV_PARAMS)}
    limit = max_tokens(body)
    leg["stream"] = False
    leg["n"] = 1
    leg["max_tokens"] = 1
    if chat:
        leg["max_completion_tokens"] = 1
    if isinstance(leg.get("min_tokens"), int):
        leg["min_tokens"] = min(leg["min_tokens"], 1)
    leg[KV_PARAMS] = {"do_remote_decode": True}
    leg[XARGS] = _xargs(body, budget_s=budget_s, target_s=target_s, slo_class=slo_class)
    if limit is not None:
        leg[XARGS][XARG_DECODE_MAX_TOKENS] = limit
    return leg


def decode_body(body: Body, kv_params: Mapping[str, Any], *, slo_class: str) -> dict[str, Any]:
    """The decode leg: the client's request, always streamed, with the prefill leg's KV parameters if there are any."""
    leg = _streamed(body)
    leg.pop(KV_PARAMS, None)
    if kv_params:
        leg[KV_PARAMS] = dict(kv_params)
    leg[XARGS] = {**_kept_xargs(body), XARG_CLASS: slo_class}
    return leg


def colocated_body(body: Body, *, budget_s: float, target_s: float, slo_class: str) -> dict[str, Any]:
    """The only leg of colocated mode: the client's request, always streamed, with its budget."""
    leg = _streamed(body)
    leg.pop(KV_PARAMS, None)
    leg[XARGS] = _xargs(body, budget_s=budget_s, target_s=target_s, slo_class=slo_class)
    return leg


def kv_params_of(answer: Body) -> dict[str, Any] | None:
    """What a prefill leg's answer says of the prompt's KV; None when it is no answer of a pod with KV transfer.

    Empty when the field is null, as vLLM answers where decode needs no address: the connector finds KV by the prompt itself
    (ExampleConnector), or the prompt's first token ends the answer and nothing is kept. Decode then finds, or computes, the KV.
    """
    found = answer.get(KV_PARAMS, False)
    if found is None:
        return {}
    return dict(found) if isinstance(found, Mapping) else None


def max_tokens(body: Body) -> int | None:
    """The client's limit on generated tokens; None when it set none."""
    for key in ("max_completion_tokens", "max_tokens"):
        value = body.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def leg_headers(client: Iterable[tuple[str, str]], request_id: str) -> dict[str, str]:
    """Headers of a leg: the few the client's request may pass on, and the leg's own id."""
    kept = {name: value for name, value in end_to_end(client) if name.lower() in FORWARDED_HEADERS}
    return {**kept, "content-type": "application/json", REQUEST_ID_HEADER: request_id}


def _streamed(body: Body) -> dict[str, Any]:
    leg = dict(body)
    if not body.get("stream"):
        leg["stream_options"] = {"include_usage": True}
    leg["stream"] = True
    return leg


def _kept_xargs(body: Body) -> dict[str, Any]:
    given = body.get(XARGS)
    if not isinstance(given, Mapping):
        return {}
    return {key: value for key, value in given.items() if key not in CLIENT_XARGS_DROPPED}


def _xargs(body: Body, *, budget_s: float, target_s: float, slo_class: str) -> dict[str, Any]:
    return {
        **_kept_xargs(body),
        XARG_BUDGET_S: round(budget_s, 6),
        XARG_TARGET_S: target_s,
        XARG_CLASS: slo_class,
    }
