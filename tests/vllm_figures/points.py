"""How soon a step stops when it is asked to, how long it goes without looking, and what looking costs."""

from __future__ import annotations

import random
import time
import timeit
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from flowprefill.bench.figures.row import Bench as Context
from flowprefill.bench.figures.row import Figure, Row
from flowprefill.engines.vllm_engine.stint import Stage, Stint
from flowprefill.engines.vllm_engine.tiles import limits_for
from flowprefill.scheduling.actions import Granularity
from support.vllm.bench import Bench, engine_core
from support.vllm.models import DEEP, model_directory
from support.vllm.tokens import random_prompt

LONG, SHORT = 8192, 64
NUM_LONG, PAUSES_EACH = 3, 8
VERY_LONG = 32_768
MAX_GAP_S = 0.02


@contextmanager
def engine(model: Path, *, max_tokens: int, dtype: str) -> Iterator[Bench]:
    core = engine_core(
        model,
        settings={"slots": 3},
        max_model_len=max_tokens,
        max_num_batched_tokens=max_tokens,
        num_gpu_blocks_override=2 * max_tokens // 32 + 64,
        dtype=dtype,
    )
    bench = Bench(core, watch_logits=False)
    try:
        yield bench
    finally:
        bench.close()
        core.shutdown()


def embedded() -> Path:
    from flowprefill.engines.models import resolve_model

    return resolve_model("embedded://smollm2-135m-instruct", None).path


def blocking(context: Context) -> Iterator[Row]:
    """From the request to pause to the step's standing still, at random moments of a long prefill; tiling off."""
    found: dict[Granularity, list[float]] = {"operator": [], "layer": []}
    took: list[float] = []
    chance = random.Random(0)
    with engine(embedded(), max_tokens=LONG, dtype="bfloat16") as bench:
        bench.worker.stage.housekeeping = None
        _long(bench, "warm", 0, [], "operator")
        usual_s = _long(bench, "usual", 1, [], "operator")[0]
        for number in range(NUM_LONG):
            for granularity, blocked in found.items():
                context.progress.step(f"{granularity} points, long prompt {number + 1} of {NUM_LONG}")
                waits = (chance.uniform(0, 2 * usual_s / PAUSES_EACH) for _ in iter(int, 1))
                seconds, acks = _long(bench, f"{granularity}-{number}", number + 2, waits, granularity)
                took.append(seconds)
                blocked += acks
    means = {name: float(np.mean(acks)) for name, acks in found.items()}
    long_s = float(np.median(took))
    detail = (
        f"operator {1e3 * means['operator']:.1f} ms of {len(found['operator'])}, layer {1e3 * means['layer']:.1f} ms of "
        f"{len(found['layer'])}, the long prefill {long_s:.2f} s"
    )
    command = "make figures SET=vllm ONLY=blocking"
    yield Row(
        name="vLLM: mean blocking, operator over layer points (8,192 against 64 tokens, same run, tiling off)",
        value=means["operator"] / means["layer"],
        op="<=",
        bar=0.33,
        command=command,
        detail=detail,
    )
    yield Row(
        name="vLLM: mean blocking over the long prefill's time, same runs",
        value=means["operator"] / long_s,
        op="<=",
        bar=0.02,
        command=command,
        detail=detail,
    )


def _long(
    bench: Bench, name: str, seed: int, waits: Iterable[float], granularity: Granularity
) -> tuple[float, list[float]]:
    """A long prefill that is paused after each of these waits, until it ends: its own seconds, and the seconds until it stood."""
    bench.add(name, random_prompt(LONG - 1, seed=seed))  # and a place for its token
    blocked: list[float] = []
    own_s = 0.0
    flight = bench.launch(name, granularity=granularity)
    began_s = time.monotonic()
    for number, wait_s in enumerate(waits):
        if bench.wait(flight, wait_s):
            break
        asked_s = time.monotonic()
        stands = bench.pause(flight)
        stood_s = time.monotonic()
        if not stands:
            break
        blocked.append(stood_s - asked_s)
        own_s += stood_s - began_s
        short = f"{name}-short-{number}"
        bench.add(short, random_prompt(SHORT, seed=10_000 + 100 * seed + number))
        bench.start(short)
        bench.go_on(flight)
        began_s = time.monotonic()
    bench.wait(flight, None)
    own_s += time.monotonic() - began_s
    bench.flush()
    return own_s, blocked


def gaps(context: Context) -> Iterator[Row]:
    """The longest stretch between two points of a very long prefill, with tiles by measured prefill times."""
    with engine(model_directory(DEEP), max_tokens=VERY_LONG, dtype="float32") as bench:
        bench.worker.stage.housekeeping = None
        seconds = {}
        for number_of_tokens in (1024, 4096):
            context.progress.step(f"measuring {number_of_tokens} tokens")
            bench.add(f"m{number_of_tokens}", random_prompt(number_of_tokens, seed=number_of_tokens))
            began_s = time.monotonic()
            bench.start(f"m{number_of_tokens}")
            seconds[number_of_tokens] = time.monotonic() - began_s
        # Two lengths give b and c of `b n + c n^2`.
        per_token = {n: s / n for n, s in seconds.items()}
        c = max((per_token[4096] - per_token[1024]) / (4096 - 1024), 1e-12)
        b = max(per_token[1024] - 1024 * c, 1e-9)
        limits = limits_for((0.0, b, c, 0.0), num_layers=DEEP.num_layers, max_gap_s=MAX_GAP_S)
        bench.worker.stage.limits = limits
        times: list[float] = []
        bench.worker.stage.housekeeping = lambda: times.append(time.monotonic())
        context.progress.step(f"{VERY_LONG} tokens")
        bench.add("long", random_prompt(VERY_LONG - 1, seed=1))
        began_s = time.monotonic()
        bench.start("long")
        ended_s = time.monotonic()
    between = np.diff([began_s, *times, ended_s])
    yield Row(
        name="vLLM: largest gap at 32,768 tokens over the whole prefill (generated Llama, 24 layers, tiling on)",
        value=float(between.max() / (ended_s - began_s)),
        op="<=",
        bar=0.002,
        command="make figures SET=vllm ONLY=gaps",
        detail=f"{len(times)} points in {ended_s - began_s:.1f} s, largest gap {1e3 * between.max():.0f} ms, p99 "
        f"{1e3 * float(np.percentile(between, 99)):.0f} ms; tiles of {limits.rows} rows and {limits.attention_pairs} pairs",
    )


class _Closed:
    """A gate that nobody asks anything of."""

    raised = False
    index = 0

    def pause(self, index: int) -> None:
        raise AssertionError


def checks(context: Context) -> Iterator[Row]:
    """What all points of a forward cost beside its CPU time."""
    stint = Stint(Stage(), _Closed(), "operator")
    repeats = 200_000
    each_s = min(timeit.repeat(stint.point, number=repeats, repeat=5)) / repeats
    shares = {}
    with engine(embedded(), max_tokens=4096, dtype="bfloat16") as bench:
        bench.worker.stage.housekeeping = None
        num_points = bench.worker.num_points["operator"]
        for number_of_tokens in (64, 2048):
            cpu_s = []
            for number in range(4):
                name = f"{number_of_tokens}-{number}"
                bench.add(name, random_prompt(number_of_tokens, seed=number))
                before_s = time.process_time()
                bench.start(name)
                cpu_s.append(time.process_time() - before_s)
            shares[number_of_tokens] = num_points * each_s / min(cpu_s[1:])
    yield Row(
        name="vLLM: points passed times cost of one check, over prefill CPU time, 64 and 2,048 tokens (the larger)",
        value=max(shares.values()),
        op="<=",
        bar=0.005,
        command="make figures SET=vllm ONLY=checks",
        detail=f"{num_points} points of {1e9 * each_s:.0f} ns; "
        + ", ".join(f"{n} tokens {100 * share:.3f} %" for n, share in shares.items()),
    )


FIGURES = (
    Figure(name="blocking", summary="blocking of a long prefill, by points", minutes=3.0, measure=blocking),
    Figure(
        name="gaps", summary="longest time between two points at 32,768 tokens", minutes=8.0, measure=gaps
    ),
    Figure(name="checks", summary="cost of the points", minutes=1.0, measure=checks),
)
