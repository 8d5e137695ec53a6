"""The engine against stock vLLM, both as servers: what a short prompt waits, and what preemption costs when nobody needs it."""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from flowprefill.bench.figures.row import Bench, Figure, Row
from flowprefill.server.vllm.flags import ONE_WORKER, SCHEDULER, WORKER
from support.vllm.completions import completion
from support.vllm.server import VllmServer, vllm_server
from support.vllm.tokens import random_prompt
from vllm_figures.points import LONG, SHORT, embedded

OURS = (
    *("--scheduler-cls", SCHEDULER, "--worker-cls", WORKER),
    *("--distributed-executor-backend", ONE_WORKER, "--no-async-scheduling"),
)
BFLOAT16 = ("--dtype", "bfloat16")
STOCK: Mapping[str, Sequence[str]] = {
    "whole": (),
    "chunk 512": ("--max-num-batched-tokens", "512"),
    "chunk 2,048": ("--max-num-batched-tokens", "2048"),
}
NUM_SHORT = 12
NUM_PAIRS, PROMPTS_EACH = 6, 6


@contextmanager
def server(folder: Path, name: str, *, flags: Sequence[str] = (), ours: bool = False) -> Iterator[VllmServer]:
    """One of the servers, on the embedded model in bfloat16."""
    with vllm_server(
        Path(sys.executable),
        embedded(),
        folder / f"{name}.log",
        flags=(*BFLOAT16, *flags, *(OURS if ours else ())),
        additional_config={"flowprefill": {}} if ours else None,
        plugins=ours,
    ) as running:
        yield running


def ttft(bench: Bench) -> Iterator[Row]:
    """A short prompt comes at a random moment of a long one's prefill."""
    waited: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="flowprefill-figures-") as name:
        for title, flags in {"ours": (), **STOCK}.items():
            bench.progress.step(f"starting {title}")
            with server(Path(name), title.replace(" ", "-"), flags=flags, ours=title == "ours") as running:
                waited[title] = asyncio.run(_short_after_long(running, bench, title))
    medians = {title: float(np.median(seconds)) for title, seconds in waited.items()}
    best = min(STOCK, key=lambda title: medians[title])
    yield Row(
        name="vLLM: short TTFT p50, ours over the best of stock FCFS (whole, chunk 512, chunk 2,048), 8,192-token longs",
        value=medians["ours"] / medians[best],
        op="<=",
        bar=0.125,
        command="make figures SET=vllm ONLY=ttft",
        detail=", ".join(f"{title} {seconds:.3f} s" for title, seconds in medians.items()),
    )


async def _short_after_long(running: VllmServer, bench: Bench, title: str) -> list[float]:
    chance = random.Random(1)
    waited = []
    async with running.client() as client:
        await completion(client, random_prompt(LONG - 1, seed=99), 1)
        began_s = time.monotonic()
        await completion(client, random_prompt(LONG - 1, seed=98), 1)
        alone_s = time.monotonic() - began_s
        for number in range(NUM_SHORT):
            bench.progress.step(f"{title}: {number + 1} of {NUM_SHORT}")
            long = asyncio.create_task(
                completion(
                    client, random_prompt(LONG - 1, seed=number), 1, vllm_xargs={"ttft_slo": 20 * alone_s}
                )
            )
            await asyncio.sleep(chance.uniform(0.02, 0.9) * alone_s)
            began_s = time.monotonic()
            await completion(
                client, random_prompt(SHORT, seed=1000 + number), 1, vllm_xargs={"ttft_slo": 0.5 * alone_s}
            )
            waited.append(time.monotonic() - began_s)
            await long
    return waited


def throughput(bench: Bench) -> Iterator[Row]:
    """The same prompts at once to both servers in turn, all with one loose target: nothing is ever preempted."""
    with tempfile.TemporaryDirectory(prefix="flowprefill-figures-") as name:
        bench.progress.step("starting both")
        with (
            server(Path(name), "ours", ours=True) as ours,
            server(Path(name), "stock", flags=("--no-async-scheduling",)) as stock,
        ):
            ratios = asyncio.run(_in_turns(ours, stock, bench))
    yield Row(
        name="vLLM: prefill throughput, one SLO, over stock `vllm serve` on the same flags, paired (median)",
        value=float(np.median(ratios)),
        op=">=",
        bar=0.99,
        command="make figures SET=vllm ONLY=throughput",
        detail=f"{len(ratios)} pairs, from {min(ratios):.3f} to {max(ratios):.3f}",
    )


async def _in_turns(ours: VllmServer, stock: VllmServer, bench: Bench) -> list[float]:
    async def run(running: VllmServer, seed: int) -> float:
        prompts = [
            random_prompt(length, seed=100 * seed + k)
            for k, length in enumerate((256, 512, 1024, 1024, 2048, 4096)[:PROMPTS_EACH])
        ]
        async with running.client() as client:
            began_s = time.monotonic()
            await asyncio.gather(
                *(completion(client, prompt, 1, vllm_xargs={"ttft_slo": 600.0}) for prompt in prompts)
            )
            return time.monotonic() - began_s

    for running in (ours, stock):
        await run(running, 999)
    ratios = []
    for pair in range(NUM_PAIRS):
        bench.progress.step(f"pair {pair + 1} of {NUM_PAIRS}")
        first, second = (ours, stock) if pair % 2 else (stock, ours)
        seconds = {id(first): await run(first, pair)}
        seconds[id(second)] = await run(second, pair)
        ratios.append(seconds[id(stock)] / seconds[id(ours)])
    return ratios


FIGURES = (
    Figure(name="ttft", summary="what a short prompt waits behind a long one", minutes=12.0, measure=ttft),
    Figure(name="throughput", summary="prefill throughput over stock vLLM", minutes=5.0, measure=throughput),
)
