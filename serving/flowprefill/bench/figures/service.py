"""Figures of the whole service on the local node: the demo load, the prefill pod's memory, and a first `make demo`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from flowprefill.bench.calibrate import prober
from flowprefill.bench.demo import compare, run_system, without_preemption
from flowprefill.bench.figures.row import Bench, Figure, Row
from flowprefill.bench.load import CHAT, DOCUMENT, at_rate
from flowprefill.bench.report import attainment, summarise
from flowprefill.engines.models import load_tokenizer, resolve_model
from flowprefill.errors import FlowPrefillError
from flowprefill_crd import FlowPrefillService, load_services, parse_service, pod_config
from flowprefill_crd.samples import sample_path

SHORT_REQUESTS = 200
SLOW_REQUESTS = 100
LONG_PROMPT = 4096
GIB = 2**30


def quickstart() -> FlowPrefillService:
    """The sample that the demonstration runs."""
    (service,) = load_services(sample_path("quickstart.yaml"))
    return service


def demo_load(bench: Bench) -> Iterator[Row]:
    """The demo load under both systems, and FCFS at a third of its rate."""
    service = quickstart()
    model = service.spec.model
    tokens = load_tokenizer(resolve_model(model.uri, model.revision).path)
    command = "flowprefill bench figures --only demo-load"
    with bench.new_target(service) as target:
        compared = compare(target, service, tokens, bench.progress, num_short=SHORT_REQUESTS)
        ours, baseline = compared.systems
        rows = {row.slo_class: row.attainment for row in summarise(ours.records)}
        told = "; ".join(
            f"{name} {share.met}/{share.total} [{share.low:.3f}, {share.high:.3f}]"
            for name, share in rows.items()
        )
        yield Row(
            name="attainment of the worse class, demo load, S-EDF and operator preemption",
            value=min(share.ratio for share in rows.values()),
            op=">=",
            bar=0.90,
            command=command,
            detail=told,
        )
        short = attainment(record for record in baseline.records if record.slo_class == CHAT)
        yield Row(
            name="attainment of the short class, demo load, FCFS with the same batching",
            value=short.ratio,
            op="<=",
            bar=0.50,
            command=command,
            detail=f"{short.met}/{short.total} [{short.low:.3f}, {short.high:.3f}]",
        )
        calibration = compared.calibration
        target.apply(without_preemption(compared.service))
        slow = asyncio.run(
            run_system(
                target,
                pod_config(service, "demo").model.served_name,
                "fcfs at a third of the rate",
                at_rate(calibration.items[:SLOW_REQUESTS], calibration.rate_per_s / 3),
                calibration.ttft_slo_s,
                bench.progress,
                salt="(D)",
            )
        )
    share = attainment(slow.records)
    yield Row(
        name="attainment over all requests, FCFS at a third of the demo rate, 100 requests",
        value=share.ratio,
        op="<",
        bar=0.90,
        command=command,
        detail=f"{share.met}/{share.total} [{share.low:.3f}, {share.high:.3f}]",
    )
    for name, q, bar in (("median", 0.5, 0.15), ("p90", 0.9, 0.40)):
        value = ours.prediction_error_quantile(q)
        if value is None:
            raise FlowPrefillError("the prefill pod reports no finished task of the demo load")
        yield Row(
            name=f"TTFT prediction error of the prefill part, demo load with prefix hits, {name}",
            value=value,
            op="<=",
            bar=bar,
            command=command,
            detail=f"{len(ours.prediction_errors)} tasks, |predicted - executed| / executed",
        )


def memory(bench: Bench) -> Iterator[Row]:
    """Peak resident memory of the prefill process after short, long and concurrent prompts."""
    body = yaml.safe_load(sample_path("quickstart.yaml").read_text())
    body["spec"]["engine"] = {"type": "torch", "dtype": "bfloat16", "kvCacheTokens": 8192}
    service = parse_service(body)
    model = service.spec.model
    tokens = load_tokenizer(resolve_model(model.uri, model.revision).path)
    with bench.new_target(service) as target:
        target.apply(service)

        async def use() -> None:
            async with prober(target.url, pod_config(service, "demo").model.served_name, tokens) as probes:
                await asyncio.gather(*(probes.send(64, max_tokens=8, slo_class=CHAT) for _ in range(8)))
                await probes.send(LONG_PROMPT, max_tokens=1, slo_class=DOCUMENT)

        asyncio.run(use())
        peak = peak_memory_bytes(target.pid("prefill"))
    yield Row(
        name="peak memory (VmHWM) of the prefill process, bf16, KV pool of 8,192 tokens, GiB",
        value=peak / GIB,
        op="<=",
        bar=1.3,
        command="flowprefill bench figures --only memory",
        detail=f"after 8 short prompts at once and one of {LONG_PROMPT:,} tokens",
    )


def peak_memory_bytes(pid: int) -> int:
    """VmHWM of a process and, where it is a wrapper, of its children: the largest."""
    peaks = [
        int(line.split()[1]) * 1024
        for candidate in (pid, *children(pid))
        for line in Path(f"/proc/{candidate}/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    ]
    if not peaks:
        raise FlowPrefillError(f"process {pid} has no VmHWM; this figure needs Linux")
    return max(peaks)


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


def cold_demo(bench: Bench) -> Iterator[Row]:
    """`make demo` in a fresh clone, with an empty cache of our own; pip's own settings stay as they are."""
    top = subprocess.run(
        ["git", "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=True
    ).stdout.strip()
    bench.progress.step("make demo in a fresh clone with an empty cache")
    with tempfile.TemporaryDirectory(prefix="flowprefill-cold-") as folder:
        clone = Path(folder) / "flowprefill"
        subprocess.run(["git", "clone", "-q", "--no-hardlinks", top, str(clone)], check=True)
        environment = {
            name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "MAKEFLAGS")
        }
        environment |= {
            "XDG_CACHE_HOME": f"{folder}/cache",
            "XDG_STATE_HOME": f"{folder}/state",
            "PIP_NO_CACHE_DIR": "1",
        }
        began_s = time.monotonic()
        log = Path(folder) / "log"
        with log.open("wb") as output:
            done = subprocess.run(
                ["make", "demo"], cwd=clone, env=environment, stdout=output, stderr=output, check=False
            )
        minutes = (time.monotonic() - began_s) / 60
        if done.returncode:
            raise FlowPrefillError(f"make demo ended with {done.returncode}:\n{log.read_text()[-2000:]}")
    yield Row(
        name="`make demo` on an empty cache, minutes",
        value=minutes,
        op="<=",
        bar=6,
        command="flowprefill bench figures --only cold-demo",
    )


FIGURES = (
    Figure(
        name="demo-load",
        summary="attainment and prediction error on the demo load",
        minutes=11,
        measure=demo_load,
    ),
    Figure(name="memory", summary="peak memory of the prefill process", minutes=1, measure=memory),
    Figure(name="cold-demo", summary="make demo on an empty cache", minutes=5, measure=cold_demo),
)
