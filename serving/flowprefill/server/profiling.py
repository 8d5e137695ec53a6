"""Warm-up: measures prefill times of a loaded engine, from which the predictor is fitted.

Runs before the pod is ready, in one thread, with nothing else on the engine. Block ids are the pool's own: nothing
is cached yet, so nothing is lost.
"""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

from flowprefill.engines.protocol import DecodeSequence, Engine, EngineSpec, PrefillItem, SamplingParams
from flowprefill.engines.simulated.engine import SimulatedEngine
from flowprefill.scheduling.profile import Profile, ProfileSample, Provenance

log = logging.getLogger(__name__)

BUDGET_S = 10.0
"""Measuring stops before a pass that would exceed this."""

SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
CACHED = ((16, 512), (64, 1024), (256, 2048))
"""(new, cached) tokens of the passes that continue a cached prefix."""

SHORT_TOKENS = 256
"""Passes up to this size are measured three times: they are cheap, and their noise is what short requests see."""


class _OpenGate:
    """A gate that never pauses."""

    raised = False
    index = 0

    def pause(self, index: int) -> None:
        raise AssertionError("nobody asks a warm-up pass to pause")


Passes: TypeAlias = Callable[[int, int, int], list[float]]
"""`passes(num_new, num_cached, repeats)` runs so many prefill passes of one request and gives the seconds of each."""


def measure_profile(engine: Engine, *, budget_s: float = BUDGET_S) -> Profile:
    """Prefill times over sizes that fit the engine, at least one sample; about `budget_s` long."""
    with engine.thread_context():
        return measure(
            lambda new, cached, repeats: _passes_s(engine, new, cached, repeats), engine.spec, budget_s
        )


def measure(passes: Passes, spec: EngineSpec, budget_s: float) -> Profile:
    """Prefill times by `passes`, over sizes that fit; at least one sample, about `budget_s` long."""
    began_s = time.monotonic()
    samples: list[ProfileSample] = []
    passes(min(16, _most(spec)), 0, 1)  # the first pass pays for what later ones find ready
    for num_new, num_cached in _shapes(spec):
        left_s = budget_s - (time.monotonic() - began_s)
        if samples and _expected_s(samples, num_new + num_cached) > left_s:
            continue
        times = passes(num_new, num_cached, 3 if num_new <= SHORT_TOKENS else 1)
        samples += [ProfileSample(num_new=num_new, num_cached=num_cached, seconds=s) for s in times]
    profile = Profile(provenance=_provenance(spec), samples=tuple(samples))
    log.info(
        "prefill times measured",
        extra={
            "samples": len(samples),
            "largest_tokens": max(sample.num_new for sample in samples),
            "largest_seconds": round(max(sample.seconds for sample in samples), 4),
            "took_seconds": round(time.monotonic() - began_s, 2),
        },
    )
    return profile


def warm_decode(engine: Engine) -> None:
    """Run one decode step, so that the first answer does not pay for what later ones find ready."""
    blocks = range(1 + -(-16 // engine.spec.block_size))
    sequence = DecodeSequence(
        request_id="warm-up", last_token_id=0, position=16, block_ids=blocks, sampling=SamplingParams()
    )
    with engine.thread_context():
        _run(engine, 16, 0, blocks)
        engine.run(engine.plan_decode([sequence]), _OpenGate())


def simulated_profile(engine: SimulatedEngine) -> Profile:
    """The profile of an engine whose times are known: its cost model's, without running anything."""
    samples = [
        ProfileSample(
            num_new=num_new, num_cached=num_cached, seconds=engine.cost.prefill_s([(num_new, num_cached)])
        )
        for num_new, num_cached in _shapes(engine.spec)
    ]
    return Profile(provenance=_provenance(engine.spec), samples=tuple(samples))


def _provenance(spec: EngineSpec) -> Provenance:
    return Provenance(
        model=f"{spec.model}@{spec.revision}",
        engine=spec.engine,
        device=spec.device,
        dtype=spec.dtype,
        tensor_parallel_size=spec.tensor_parallel_size,
        taken_on=datetime.datetime.now(datetime.UTC).date(),
    )


def _most(spec: EngineSpec) -> int:
    return min(spec.max_model_len, spec.num_kv_blocks * spec.block_size)


def _shapes(spec: EngineSpec) -> Iterator[tuple[int, int]]:
    most = _most(spec)
    fitting = [size for size in SIZES if size <= most] or [most]
    yield from ((size, 0) for size in fitting)
    yield from ((new, cached) for new, cached in CACHED if new + cached <= most)


def _expected_s(samples: list[ProfileSample], num_tokens: int) -> float:
    """A pass takes at most quadratically longer than the largest one so far."""
    largest = max(samples, key=lambda sample: sample.num_new)
    return largest.seconds * max(num_tokens / largest.num_new, 1.0) ** 2


def _passes_s(engine: Engine, num_new: int, num_cached: int, repeats: int) -> list[float]:
    """Seconds of each pass. A cached prefix is computed once before, in a pass that does not count."""
    blocks = range(-(-(num_new + num_cached) // engine.spec.block_size))
    if num_cached:
        _run(engine, num_cached, 0, blocks)
    times = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        _run(engine, num_new, num_cached, blocks)
        times.append(time.perf_counter() - began_s)
    return times


def _run(engine: Engine, num_new: int, start: int, blocks: range) -> None:
    vocabulary = engine.spec.vocab_size
    item = PrefillItem(
        request_id="warm-up",
        token_ids=[(start + i) * 7919 % vocabulary for i in range(num_new)],
        start=start,
        block_ids=blocks,
        sample=True,
    )
    plan = engine.plan_prefill([item], "operator")
    engine.run(plan, _OpenGate())
