"""Figures of the torch engine on the embedded model. CPU time throughout: one thread does the work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

from flowprefill.bench.figures.row import Bench, Figure, Row
from flowprefill.engines.models import resolve_model
from flowprefill.engines.protocol import PrefillItem
from flowprefill.engines.torch_engine import TorchEngine
from flowprefill.engines.torch_engine.instrument import instrument
from flowprefill.engines.torch_engine.kv import PagedKV
from flowprefill.engines.torch_engine.run_state import RunState, Runtime
from flowprefill.scheduling.actions import Granularity

MODEL = "embedded://smollm2-135m-instruct"
BOUND_S = 0.02
BLOCK_SIZE = 16


class OpenGate:
    """A gate that never pauses: the cost of a check when nobody asks."""

    def __init__(self) -> None:
        self.raised = False
        self.index = 0

    def pause(self, index: int) -> None:
        raise AssertionError("nobody asked for a pause")


class StopwatchGate:
    """A gate that notes the thread's CPU time at every point and lets the task go on."""

    def __init__(self) -> None:
        self.raised = True
        self.index = 0
        self.passed_s: list[float] = []

    def pause(self, index: int) -> None:
        self.passed_s.append(time.thread_time())


def load(*, kv_tokens: int, max_gap_s: float | None = BOUND_S) -> TorchEngine:
    """The embedded model in the dtype that this machine runs faster."""
    path = resolve_model(MODEL).path
    return TorchEngine.load(
        path, dtype="auto", kv_cache_tokens=kv_tokens, block_size=BLOCK_SIZE, max_gap_s=max_gap_s
    )


def items_of(lengths: Sequence[int], vocab_size: int) -> list[PrefillItem]:
    """One new request per length, in blocks of its own."""
    items, block = [], 0
    for number, length in enumerate(lengths):
        blocks = -(-length // BLOCK_SIZE)
        ids = [(7919 * (position + number + 1)) % (vocab_size - 100) + 50 for position in range(length)]
        items.append(
            PrefillItem(
                request_id=str(number),
                token_ids=ids,
                start=0,
                block_ids=range(block, block + blocks),
                sample=True,
            )
        )
        block += blocks
    return items


def prefill_cpu_s(engine: TorchEngine, lengths: Sequence[int]) -> float:
    """CPU seconds of one packed prefill, planning included."""
    items = items_of(lengths, engine.spec.vocab_size)
    began_s = time.thread_time()
    engine.run(engine.plan_prefill(items, "operator"), OpenGate())
    return time.thread_time() - began_s


def gaps_s(
    engine: TorchEngine, num_tokens: int, granularity: Granularity
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """CPU seconds between the points of one prefill, from its start to its end."""
    gate = StopwatchGate()
    items = items_of([num_tokens], engine.spec.vocab_size)
    began_s = time.thread_time()
    engine.run(engine.plan_prefill(items, granularity), gate)
    return np.diff([began_s, *gate.passed_s, time.thread_time()])


def mean_blocking_s(gaps: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Expected time to the next point for a pause asked for at a uniformly random moment: sum x^2 / (2 sum x)."""
    return float(np.square(gaps).sum() / (2 * gaps.sum()))


def median_ratio(first: Callable[[], float], second: Callable[[], float], pairs: int) -> float:
    """Median of first over second, measured in turns so that both see the same machine."""
    first(), second()  # caches and allocators
    ratios = []
    for number in range(pairs):
        if number % 2:
            b, a = second(), first()
        else:
            a, b = first(), second()
        ratios.append(a / b)
    return statistics.median(ratios)


def blocking(_: Bench) -> Iterator[Row]:
    """Operator against layer points, operators whole."""
    engine = load(kv_tokens=2048, max_gap_s=None)
    gaps_s(engine, 512, "operator")
    pairs = [
        (mean_blocking_s(gaps_s(engine, 2048, "operator")), mean_blocking_s(gaps_s(engine, 2048, "layer")))
        for _ in range(3)
    ]
    fine, coarse = (statistics.median(values) for values in zip(*pairs, strict=True))
    yield Row(
        name="mean blocking, operator over layer points (pause request to ACK, arrival uniform in a 2,048-token "
        "prefill, tiling off)",
        value=statistics.median(a / b for a, b in pairs),
        op="<=",
        bar=0.29,
        command="flowprefill bench figures --only blocking",
        detail=f"operator {fine * 1e3:.1f} ms, layer {coarse * 1e3:.1f} ms of CPU time, {engine.spec.dtype}",
    )


def gaps(_: Bench) -> Iterator[Row]:
    """Gaps between points of a long prompt."""
    engine = load(kv_tokens=8192)
    gaps_s(engine, 512, "operator")
    found = gaps_s(engine, 8192, "operator")
    p99 = float(np.quantile(found, 0.99))
    yield Row(
        name="p99 of gaps between points at 8,192 tokens over a bound of 20 ms",
        value=p99 / BOUND_S,
        op="<=",
        bar=1.5,
        command="flowprefill bench figures --only gaps",
        detail=f"{len(found)} gaps, p99 {p99 * 1e3:.1f} ms, longest {found.max() * 1e3:.1f} ms, {engine.spec.dtype}",
    )


def check_cost_s(engine: TorchEngine) -> float:
    """CPU seconds that one point adds to a linear operator: half of what wrapping adds to a call."""

    class Nothing(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input

    plain, wrapped = Nothing(1, 1), Nothing(1, 1)
    runtime = Runtime()
    instrument((), (wrapped,), runtime)
    runtime.active = RunState(
        runtime=runtime,
        kv=PagedKV(
            num_layers=1,
            num_blocks=1,
            block_size=BLOCK_SIZE,
            num_kv_heads=1,
            head_dim=1,
            dtype=torch.float32,
            device=torch.device("cpu"),
        ),
        plan=engine.plan_prefill(items_of([16], engine.spec.vocab_size), "operator"),
        gate=OpenGate(),
        places=(),
        block_tables=[],
        sampled=None,
        window=None,
    )
    argument = torch.zeros(1)
    calls = 50_000

    def cost(module: nn.Module) -> float:
        forward = module.forward
        began_s = time.thread_time()
        for _ in range(calls):
            forward(argument)
        return time.thread_time() - began_s

    pairs = [(cost(wrapped), cost(plain)) for _ in range(7)]
    return statistics.median(a - b for a, b in pairs) / calls / 2


def checks(_: Bench) -> Iterator[Row]:
    """What points cost when nobody asks for a pause."""
    engine = load(kv_tokens=2048)
    each_s = check_cost_s(engine)
    shares = []
    for length in (64, 2048):
        prefill_cpu_s(engine, [length])
        took_s = statistics.median(
            prefill_cpu_s(engine, [length]) for _run in range(9 if length == 64 else 3)
        )
        points = engine.plan_prefill(items_of([length], engine.spec.vocab_size), "operator").num_points
        shares.append((points * each_s / took_s, length, points, took_s))
    worst = max(share for share, *rest in shares)
    yield Row(
        name="points passed times cost of one check, over prefill CPU time, at 64 and 2,048 tokens",
        value=worst,
        op="<=",
        bar=0.005,
        command="flowprefill bench figures --only checks",
        detail=f"check {each_s * 1e9:.0f} ns; "
        + "; ".join(f"{n} tokens: {points} points in {took * 1e3:.0f} ms" for _, n, points, took in shares),
    )


def plain_sdpa(_: Bench) -> Iterator[Row]:
    """Ours against one plain transformers forward."""
    from transformers import AutoModelForCausalLM

    engine = load(kv_tokens=4096)
    dtype = getattr(torch, engine.spec.dtype)
    # transformers' factory is untyped.
    model = AutoModelForCausalLM.from_pretrained(  # type: ignore[no-untyped-call]
        resolve_model(MODEL).path, dtype=dtype, attn_implementation="sdpa"
    ).eval()

    def plain_cpu_s(length: int) -> float:
        ids = torch.tensor([items_of([length], engine.spec.vocab_size)[0].token_ids])
        with torch.inference_mode():
            began_s = time.thread_time()
            model(ids, logits_to_keep=1, use_cache=False)
            return time.thread_time() - began_s

    def ours_cpu_s(length: int) -> float:
        return prefill_cpu_s(engine, [length])

    ratios = {
        length: median_ratio(partial(plain_cpu_s, length), partial(ours_cpu_s, length), pairs)
        for length, pairs in ((64, 25), (1024, 7), (4096, 3))
    }
    yield Row(
        name="prefill CPU time of a plain transformers sdpa forward (`logits_to_keep=1`) over ours, points and tiling "
        "on, worst of 64, 1,024, 4,096 tokens",
        value=min(ratios.values()),
        op=">=",
        bar=0.95,
        command="flowprefill bench figures --only plain-sdpa",
        detail=f"{engine.spec.dtype}; " + ", ".join(f"{n} tokens {ratio:.3f}" for n, ratio in ratios.items()),
    )


def packing(_: Bench) -> Iterator[Row]:
    """Short prompts in one pass against one pass each."""
    engine = load(kv_tokens=2048)
    ratio = median_ratio(
        lambda: sum(prefill_cpu_s(engine, [16]) for _ in range(16)),
        lambda: prefill_cpu_s(engine, [16] * 16),
        7,
    )
    yield Row(
        name="throughput of 16 prompts of 16 tokens packed over one by one",
        value=ratio,
        op=">=",
        bar=1.8,
        command="flowprefill bench figures --only packing",
        detail=f"{engine.spec.dtype}",
    )


FIGURES = (
    Figure(
        name="blocking", summary="mean blocking of operator and layer points", minutes=1.0, measure=blocking
    ),
    Figure(name="gaps", summary="gaps between points of 8,192 tokens", minutes=1.0, measure=gaps),
    Figure(name="checks", summary="cost of points that nobody uses", minutes=0.5, measure=checks),
    Figure(name="plain-sdpa", summary="CPU time against plain transformers", minutes=2.5, measure=plain_sdpa),
    Figure(name="packing", summary="packed short prompts", minutes=0.5, measure=packing),
)
