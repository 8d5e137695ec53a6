"""When a request must have its first token, from what the proxy says and the live document's classes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flowprefill.metrics.scheduler import OTHER
from flowprefill.wire import XARG_BUDGET_S, XARG_CLASS, XARG_DECODE_MAX_TOKENS, XARG_TARGET_S
from flowprefill_crd import LiveConfig

MAX_TARGET_S = 86_400.0
DEFAULT_TBT_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """One request's targets. `budget_s` is what is left of `ttft_s` on arrival here; negative when it is late."""

    slo_class: str
    budget_s: float
    ttft_s: float
    tbt_s: float
    weight: float
    shed_when_infeasible: bool


def slo_of(xargs: Mapping[str, object], live: LiveConfig) -> Slo:
    """The targets of a request with these `vllm_xargs`.

    Absent or unusable values fall back to the class and its target, an unknown class to the default class's
    numbers under the name `other`; nothing here fails a request.
    """
    named = xargs.get(XARG_CLASS)
    found = next((c for c in live.slo_classes if c.name == named), None)
    slo_class = found or live.default_slo_class
    target_s = _number(xargs.get(XARG_TARGET_S), low=1e-3, high=MAX_TARGET_S)
    budget_s = _number(xargs.get(XARG_BUDGET_S), low=-MAX_TARGET_S, high=MAX_TARGET_S)
    ttft_s = target_s if target_s is not None else slo_class.ttft_slo_s
    return Slo(
        slo_class=slo_class.name if found is not None or named is None else OTHER,
        budget_s=ttft_s if budget_s is None else budget_s,
        ttft_s=ttft_s,
        tbt_s=slo_class.tbt_slo_s or DEFAULT_TBT_S,
        weight=float(slo_class.weight),
        shed_when_infeasible=slo_class.shed_when_infeasible,
    )


def decode_max_tokens(xargs: Mapping[str, object]) -> int | None:
    """The client's own `max_tokens`, which the prefill leg replaced by 1; None when it set none."""
    value = xargs.get(XARG_DECODE_MAX_TOKENS)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


def _number(value: object, *, low: float, high: float) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not math.isfinite(value):
        return None
    return min(max(float(value), low), high)
