"""The demonstration: one load, two schedulers, a table.

1. Bring the service up; profile it with decode busy; measure each class's isolated TTFT.
2. Choose lengths, rate and targets from that (`load.py` states the rules).
3. Replay the load under the service's own scheduling, then under FCFS without preemption, with the same batching.
4. Print and write what was seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from flowprefill.bench.calibrate import (
    capacity_per_s,
    isolated_ttft_s,
    profile_with_decode_busy,
    read_history,
    salted,
    template_tokens,
)
from flowprefill.bench.load import (
    CHAT,
    LOAD,
    SLO_FACTOR,
    LoadItem,
    Shape,
    Tokens,
    at_rate,
    choose_shape,
    make_load,
    mean_service_s,
)
from flowprefill.bench.replay import replay
from flowprefill.bench.report import RequestRecord, quantile
from flowprefill.bench.target import Target
from flowprefill.scheduling.predictor import Coefficients, Predictor
from flowprefill_crd import FlowPrefillService, SloClass, pod_config

DEMO_SHORT_REQUESTS = 60
SEED = 17
"""One draw of arrivals for all systems and machines. DESIGN.md tells how much another one would change."""
DEFAULT_MODEL_LEN = 8192
"""Longest prompt that the load may choose when the service sets no limit; the load stays far below."""
BURST_REQUESTS = 16
"""Requests that are sent at once to measure capacity; the faster of two bursts counts."""


class Progress(Protocol):
    """Where the demonstration tells what it does."""

    def step(self, text: str) -> None:
        """A new step begins."""
        ...

    def replaying(self, name: str, num_requests: int, seconds: float) -> None:
        """A replay of so many requests over about so many seconds begins."""
        ...

    def record(self, record: RequestRecord) -> None:
        """One request of the replay ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What the load was derived from, and what was derived."""

    coefficients: Coefficients
    shape: Shape
    isolated_ttft_s: dict[str, float]
    ttft_slo_s: dict[str, float]
    mean_service_s: float
    capacity_per_s: float
    rate_per_s: float
    items: tuple[LoadItem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemResult:
    """One replay: a record per request, and what the prefill pod remembers of it.

    `prediction_errors` are |predicted - executed| / executed of every completed prefill task.
    """

    name: str
    records: tuple[RequestRecord, ...]
    preemptions: int
    blocking_s: tuple[float, ...]
    prediction_errors: tuple[float, ...]

    @property
    def sample(self) -> RequestRecord | None:
        """A short request that was answered, to show that a real model spoke."""
        answered = [record for record in self.records if record.slo_class == CHAT and len(record.text) > 20]
        return max(answered, key=lambda record: len(record.text), default=None)

    def blocking_quantile_s(self, q: float) -> float | None:
        return quantile(self.blocking_s, q)

    def prediction_error_quantile(self, q: float) -> float | None:
        return quantile(self.prediction_errors, q)


def with_targets(service: FlowPrefillService, ttft_slo_s: dict[str, float]) -> FlowPrefillService:
    """The service with each class's TTFT target replaced, whole milliseconds."""
    classes = tuple(
        _with_target(c, ttft_slo_s[c.name]) if c.name in ttft_slo_s else c for c in service.spec.slo_classes
    )
    return _respecified(service, {"slo_classes": classes})


def without_preemption(service: FlowPrefillService) -> FlowPrefillService:
    """The baseline: first come, first served, every prefill to its end, batching as before."""
    scheduling = service.spec.scheduling.model_copy(update={"policy": "fcfs", "preemption": "none"})
    return _respecified(service, {"scheduling": scheduling})


def _with_target(slo_class: SloClass, ttft_s: float) -> SloClass:
    changed = slo_class.model_dump(by_alias=True, exclude_unset=True)
    return SloClass.model_validate(changed | {"ttftMilliseconds": max(round(ttft_s * 1e3), 1)})


def _respecified(service: FlowPrefillService, update: dict[str, object]) -> FlowPrefillService:
    return service.model_copy(update={"spec": service.spec.model_copy(update=update)})


async def calibrate(
    target: Target, model: str, tokens: Tokens, progress: Progress, *, num_short: int, max_model_len: int
) -> Calibration:
    """Derive the load from this machine. The service runs and is idle."""
    progress.step("profiling prefill while decode is busy")
    predictor: Predictor = await profile_with_decode_busy(
        target.url, target.admin_url("prefill"), model, tokens, max_model_len=max_model_len
    )
    shape = choose_shape(predictor.predict_s, max_model_len)
    overhead = await template_tokens(target.url, model, tokens)
    progress.step("measuring the isolated TTFT of each class")
    isolated = await isolated_ttft_s(target.url, model, tokens, shape, overhead_tokens=overhead)
    items = make_load(
        tokens, shape, num_short=num_short, seed=SEED, overhead_tokens=overhead + len(tokens.encode("(A)"))
    )
    service_s = mean_service_s(items, predictor.predict_s)
    progress.step("measuring how much this machine can prefill")
    # Other programs on the machine only ever lower what is measured.
    bursts = [items[:BURST_REQUESTS], items[BURST_REQUESTS : 2 * BURST_REQUESTS]]
    capacity = max(
        [await capacity_per_s(target.url, model, burst, predictor, service_s) for burst in bursts if burst]
    )
    return Calibration(
        coefficients=predictor.coefficients,
        shape=shape,
        isolated_ttft_s=isolated,
        ttft_slo_s={name: SLO_FACTOR[name] * ttft_s for name, ttft_s in isolated.items()},
        mean_service_s=service_s,
        capacity_per_s=capacity,
        rate_per_s=LOAD * capacity,
        items=at_rate(items, LOAD * capacity),
    )


async def run_system(
    target: Target,
    model: str,
    name: str,
    items: Sequence[LoadItem],
    ttft_slo_s: dict[str, float],
    progress: Progress,
    *,
    salt: str,
) -> SystemResult:
    """Replay `items`, salted, against the service as it is configured now."""
    admin = target.admin_url("prefill")
    before = await read_history(admin)
    progress.replaying(name, len(items), items[-1].at_s)
    records = await replay(
        target.url,
        model,
        salted(tuple(items), salt),
        ttft_slo_s=ttft_slo_s,
        run=name,
        on_record=progress.record,
    )
    seen = (await read_history(admin)).since(before)
    predicted = [(float(str(entry["predicted_s"])), float(str(entry["executed_s"]))) for entry in seen.tasks]
    return SystemResult(
        name=name,
        records=records,
        preemptions=sum(int(str(entry["preemptions"])) for entry in seen.tasks),
        blocking_s=tuple(float(str(entry["blocking_s"])) for entry in seen.preemptions),
        prediction_errors=tuple(abs(said - took) / took for said, took in predicted if took > 0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The demonstration's outcome. `service` is the first system's, with its targets."""

    service: FlowPrefillService
    calibration: Calibration
    systems: tuple[SystemResult, ...]


def compare(
    target: Target,
    service: FlowPrefillService,
    tokens: Tokens,
    progress: Progress,
    *,
    num_short: int = DEMO_SHORT_REQUESTS,
    on_calibrated: Callable[[Calibration], None] = lambda calibration: None,
) -> Comparison:
    """The demonstration on a target that is stopped now; it runs afterwards."""
    model = pod_config(service, "demo").model
    progress.step("starting the service")
    target.apply(service)
    calibration = asyncio.run(
        calibrate(
            target,
            model.served_name,
            tokens,
            progress,
            num_short=num_short,
            max_model_len=model.max_model_len or DEFAULT_MODEL_LEN,
        )
    )
    on_calibrated(calibration)
    targeted = with_targets(service, calibration.ttft_slo_s)
    scheduling = service.spec.scheduling
    systems = []
    for salt, name, candidate in (
        ("(A)", f"{scheduling.policy}, {scheduling.preemption} preemption", targeted),
        ("(B)", "fcfs, no preemption", without_preemption(targeted)),
    ):
        target.apply(candidate)
        running = run_system(
            target,
            model.served_name,
            name,
            calibration.items,
            calibration.ttft_slo_s,
            progress,
            salt=salt,
        )
        systems.append(asyncio.run(running))
    return Comparison(service=targeted, calibration=calibration, systems=tuple(systems))
