"""Measures what each operator of a model costs on this machine, by timing the gaps between preemption points."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from flowprefill.engines.protocol import PrefillItem
from flowprefill.engines.torch_engine.costs import Costs, LayerCosts, Line, from_flops
from flowprefill.engines.torch_engine.layout import Tiles
from flowprefill.engines.torch_engine.trace import LayerTrace, ModelTrace

if TYPE_CHECKING:
    from flowprefill.engines.torch_engine.engine import TorchEngine

SMALL_ROWS = 64
LARGE_ROWS = 256
PAST_ROWS = 1024
PACKED = 8
"""Prompts of one packed run, of `SMALL_ROWS` tokens together: tells what an attention call costs however short."""

BUDGET_S = 4.0
"""Repeats stop after this; one run of each kind always happens."""


class TimingGate:
    """A gate that never pauses and writes down when each point was passed."""

    raised = False

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.times_s: list[float] = []

    @property
    def index(self) -> int:
        return len(self.times_s) - 1

    @index.setter
    def index(self, value: int) -> None:
        self.times_s.append(self._clock())

    def pause(self, index: int) -> None:
        return


def point_times(engine: TorchEngine, rows: int, past: int = 0, copies: int = 1) -> list[float]:
    """Seconds from the start of a prefill of `rows` tokens after `past` cached ones to each point, and to its end.

    `copies` such prompts are packed. CPU time of this thread. What the pool holds does not matter to the time; its blocks are overwritten.
    """
    gate = TimingGate(time.thread_time)
    plan = engine.plan_prefill([dummy_item(engine, rows, past)] * copies, "operator")
    start_s = time.thread_time()
    engine.run(plan, gate)
    gate.times_s.append(time.thread_time())
    return [moment - start_s for moment in gate.times_s]


def dummy_item(engine: TorchEngine, rows: int, past: int = 0) -> PrefillItem:
    """A prompt of arbitrary tokens. Block ids repeat when the pool is smaller than the prompt."""
    spec = engine.spec
    count = -(-(rows + past) // spec.block_size)
    return PrefillItem(
        request_id="measurement",
        token_ids=[(17 * token + 5) % spec.vocab_size for token in range(rows)],
        start=past,
        block_ids=[block % spec.num_kv_blocks for block in range(count)],
        sample=True,
    )


def measure(engine: TorchEngine) -> Costs:
    """Costs of the engine's model on this machine; a rate per operation where gaps cannot be seen (GPUs)."""
    if not engine.spec.device.startswith("cpu"):
        return from_flops(engine.trace, _device_flops_per_s(engine))
    tiles, engine.tiles = engine.tiles, Tiles()
    try:
        started_s = time.perf_counter()
        point_times(engine, SMALL_ROWS)  # the first run pays for allocations
        shapes = (
            (SMALL_ROWS, 0, 1),
            (LARGE_ROWS, 0, 1),
            (LARGE_ROWS, PAST_ROWS, 1),
            (SMALL_ROWS // PACKED, 0, PACKED),
        )
        runs = {shape: [_gaps(point_times(engine, *shape))] for shape in shapes}
        for shape in shapes:
            if time.perf_counter() - started_s < BUDGET_S:
                runs[shape].append(_gaps(point_times(engine, *shape)))
    finally:
        engine.tiles = tiles
    best = [[min(times) for times in zip(*runs[shape], strict=True)] for shape in shapes]
    return _fit(engine.trace, *best)


def _gaps(times_s: list[float]) -> list[float]:
    return [after - before for before, after in pairwise([0.0, *times_s])]


def _fit(
    trace: ModelTrace, small: list[float], large: list[float], late: list[float], packed: list[float]
) -> Costs:
    """Lines through the gaps of four runs: few rows, many rows, many rows after a long past, few rows in many prompts."""
    heads = trace.num_kv_heads * trace.group_size
    short_call_s = _short_call_s(trace, packed)

    def rows(index: int) -> Line:
        return _line(SMALL_ROWS, small[index], LARGE_ROWS, large[index])

    def attention(index: int) -> tuple[Line, Line]:
        """One call, and what a tile pays before its first."""
        near, far = heads * SMALL_ROWS**2, heads * LARGE_ROWS * (PAST_ROWS + LARGE_ROWS)
        whole = _line(near, small[index], far, late[index])
        short = heads * (SMALL_ROWS // PACKED) ** 2
        call_s = min(max(short_call_s - whole.per_unit_s * short, 0.0), whole.fixed_s)
        return replace(whole, fixed_s=call_s), Line(fixed_s=whole.fixed_s - call_s, per_unit_s=0.0)

    # Gap i ends at point i. A layer has its start, and two points per operator; what follows its last one ends it.
    found: dict[LayerTrace, list[LayerCosts]] = {}
    index = 1
    for layer in trace.layers:
        leads, ops, start = [], [], Line(fixed_s=0.0, per_unit_s=0.0)
        for op in layer.ops:
            leads.append(rows(index))
            if op.kind == "attention":
                call, start = attention(index + 1)
                ops.append(call)
            else:
                ops.append(rows(index + 1))
            index += 2
        seen = LayerCosts(leads=tuple(leads), ops=tuple(ops), end=rows(index), attention_start=start)
        found.setdefault(layer, []).append(seen)
        index += 1
    # The last layer's end runs up to the head. That had one row in every run: more cost what the layers' operators do.
    layers = {layer: _median_costs(seen) for layer, seen in found.items()}
    per_flop_s = _seconds_per_flop(layers)
    tail = [Line(fixed_s=large[position], per_unit_s=0.0) for position in range(index - 1, len(large))]
    for number, op in enumerate(trace.tail):
        per_row_s = op.flops_per_row * per_flop_s
        one_s = tail[2 * number + 1].fixed_s
        tail[2 * number + 1] = Line(fixed_s=max(one_s - per_row_s, 0.0), per_unit_s=per_row_s)
    return Costs(
        begin=rows(0),
        layers=layers,
        tail=tuple(tail),
        measured=True,
    )


def _short_call_s(trace: ModelTrace, packed: list[float]) -> float:
    """Median seconds of an attention call after the first one of its tile."""
    calls: list[float] = []
    index = 1
    for layer in trace.layers:
        for op in layer.ops:
            if op.kind == "attention":
                calls += packed[index + 2 : index + 1 + PACKED]
                index += 1 + PACKED
            else:
                index += 2
        index += 1
    return median(calls)


def _seconds_per_flop(layers: dict[LayerTrace, LayerCosts]) -> float:
    """What one operation costs in the largest linear operator."""
    found = [
        (op.flops_per_row, line.per_unit_s)
        for layer, costs in layers.items()
        for op, line in zip(layer.ops, costs.ops, strict=True)
        if op.kind == "linear"
    ]
    flops, seconds = max(found, default=(1, 0.0))
    return seconds / flops


def _median_costs(seen: list[LayerCosts]) -> LayerCosts:
    """Layers of one kind cost the same; their median is free of what else the machine did."""
    return LayerCosts(
        leads=tuple(_median_line(lines) for lines in zip(*(costs.leads for costs in seen), strict=True)),
        ops=tuple(_median_line(lines) for lines in zip(*(costs.ops for costs in seen), strict=True)),
        end=_median_line(tuple(costs.end for costs in seen)),
        attention_start=_median_line(tuple(costs.attention_start for costs in seen)),
    )


def _median_line(lines: tuple[Line, ...]) -> Line:
    return Line(
        fixed_s=median(line.fixed_s for line in lines), per_unit_s=median(line.per_unit_s for line in lines)
    )


def _line(small: float, small_s: float, large: float, large_s: float) -> Line:
    per_unit_s = max((large_s - small_s) / (large - small), 0.0)
    return Line(fixed_s=max(small_s - per_unit_s * small, 0.0), per_unit_s=per_unit_s)


def _device_flops_per_s(engine: TorchEngine) -> float:
    """Operations per second over one whole prefill."""
    rows = min(1024, engine.spec.max_model_len)
    plan = engine.plan_prefill([dummy_item(engine, rows)], "operator")
    engine.run(plan, TimingGate())
    engine.synchronize()
    start_s = time.perf_counter()
    engine.run(plan, TimingGate())
    engine.synchronize()
    elapsed_s = time.perf_counter() - start_s
    flops = rows * sum(op.flops_per_row for layer in engine.trace.layers for op in layer.ops)
    return max(flops, 1) / max(elapsed_s, 1e-6)
