"""The demonstration on a terminal and on disk."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flowprefill.bench.demo import Calibration, Comparison, SystemResult
from flowprefill.bench.load import LOAD
from flowprefill.bench.report import ClassSummary, RequestRecord, goodput_per_s, summarise

LINE_EVERY_S = 10.0


PLAIN_WIDTH = 140
VERSIONS = ("flowprefill", "torch", "transformers", "fastapi", "uvicorn", "numpy")


def new_console() -> Console:
    """The terminal; where there is none, wide enough for whole rows."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


class Screen:
    """Live progress of a demonstration: a bar on a terminal, sparse lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._met: dict[str, list[int]] = {}
        self._said_s = 0.0

    def step(self, text: str) -> None:
        self._end()
        self._console.print(f"[bold]==>[/] {text}")

    def replaying(self, name: str, num_requests: int, seconds: float) -> None:
        self.step(f"replaying {num_requests} requests in about {seconds:.0f} s under {name}")
        self._met = {}
        self._bar = Progress(
            TextColumn("    "),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self._console,
        )
        self._bar.add_task("", total=num_requests)
        if self._console.is_terminal:
            self._bar.start()

    def record(self, record: RequestRecord) -> None:
        counts = self._met.setdefault(record.slo_class, [0, 0])
        counts[0] += record.met
        counts[1] += 1
        if self._bar is not None:
            words = ", ".join(
                f"{name} {met}/{total} in time" for name, (met, total) in sorted(self._met.items())
            )
            self._bar.update(self._bar.task_ids[0], advance=1, description=words)
            now_s = time.monotonic()
            if not self._console.is_terminal and now_s - self._said_s > LINE_EVERY_S:
                self._said_s = now_s
                self._console.print(f"    {words}")

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._end()


def print_calibration(console: Console, calibration: Calibration) -> None:
    """Say what the load is and where it comes from."""
    shape = calibration.shape
    low, high = shape.document_range
    targets = ", ".join(
        f"{name} {slo_s * 1e3:.0f} ms (isolated {calibration.isolated_ttft_s[name] * 1e3:.0f} ms)"
        for name, slo_s in calibration.ttft_slo_s.items()
    )
    for line in (
        (
            f"short prompts of {shape.short_range[0]} to {shape.short_range[1]} tokens, documents of {low} to {high}, "
            f"{low / shape.short_mean:.0f} to {high / shape.short_mean:.0f} times longer"
        ),
        (
            f"{calibration.rate_per_s:.2f} requests/s, {LOAD:g} of the {calibration.capacity_per_s:.2f} that this machine "
            f"prefills when it never rests"
        ),
        f"TTFT targets: {targets}",
    ):
        console.print(f"    {line}", soft_wrap=True)


def print_results(console: Console, results: Sequence[SystemResult]) -> None:
    """The table, and one answer."""
    table = Table(title="TTFT SLO attainment, the same load under two schedulers", title_justify="left")
    for heading in ("scheduling", "class", "target"):
        table.add_column(heading)
    for heading in ("requests", "in time", "95 % interval", "TTFT p50", "TTFT p99"):
        table.add_column(heading, justify="right")
    for result in results:
        for position, row in enumerate(summarise(result.records)):
            table.add_row(result.name if position == 0 else "", *_cells(row), end_section=False)
        table.add_section()
    console.print(table)
    engine = Table(title="What the prefill engine did", title_justify="left")
    engine.add_column("scheduling")
    for heading in (
        "preemptions",
        "blocking p50",
        "blocking p99",
        "prediction error p50",
        "p90",
        "goodput",
    ):
        engine.add_column(heading, justify="right")
    for result in results:
        engine.add_row(
            result.name,
            str(result.preemptions),
            _ms(result.blocking_quantile_s(0.5)),
            _ms(result.blocking_quantile_s(0.99)),
            _percent(result.prediction_error_quantile(0.5)),
            _percent(result.prediction_error_quantile(0.9)),
            f"{goodput_per_s(result.records):.2f}/s",
        )
    console.print(engine)
    if (sample := results[0].sample) is not None:
        console.print(
            f"One answer, from {sample.num_prompt_tokens} prompt tokens: [italic]{sample.text.strip()!r}[/]"
        )


def _cells(row: ClassSummary) -> tuple[str, ...]:
    share = row.attainment
    colour = "green" if share.ratio >= 0.9 else "red" if share.ratio <= 0.5 else "yellow"
    return (
        row.slo_class,
        _ms(row.ttft_slo_s),
        str(share.total),
        f"[{colour}]{share.ratio:.1%}[/]",
        f"{share.low:.1%} to {share.high:.1%}",
        _ms(row.ttft_p50_s),
        _ms(row.ttft_p99_s),
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.0f} ms"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.0%}"


def environment() -> dict[str, object]:
    """Commit, versions and hardware of this run."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    dirty = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip() or None,
        "uncommitted_changes": bool(dirty.stdout.strip()),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in VERSIONS},
        "platform": platform.platform(),
        "processor": _processor(),
        "num_cpus": os.cpu_count(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def summary(comparison: Comparison) -> dict[str, object]:
    """The table as data."""
    calibration = comparison.calibration
    return {
        "calibration": {
            "coefficients": calibration.coefficients,
            "shape": asdict(calibration.shape),
            "isolated_ttft_s": calibration.isolated_ttft_s,
            "ttft_slo_s": calibration.ttft_slo_s,
            "mean_service_s": calibration.mean_service_s,
            "capacity_per_s": calibration.capacity_per_s,
            "rate_per_s": calibration.rate_per_s,
        },
        "systems": [
            {
                "name": result.name,
                "classes": [asdict(row) for row in summarise(result.records)],
                "preemptions": result.preemptions,
                "blocking_p50_s": result.blocking_quantile_s(0.5),
                "blocking_p99_s": result.blocking_quantile_s(0.99),
                "prediction_error_p50": result.prediction_error_quantile(0.5),
                "prediction_error_p90": result.prediction_error_quantile(0.9),
                "goodput_per_s": goodput_per_s(result.records),
                "sample": None if result.sample is None else result.sample.text,
            }
            for result in comparison.systems
        ],
    }


def write_run(folder: Path, comparison: Comparison) -> None:
    """Write service.yaml, environment.json, requests.jsonl (a row a request) and summary.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    body = comparison.service.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"status"})
    (folder / "service.yaml").write_text(yaml.safe_dump(body, sort_keys=False))
    (folder / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n")
    with (folder / "requests.jsonl").open("w") as rows:
        for result in comparison.systems:
            for record in result.records:
                rows.write(json.dumps({"system": result.name, "met": record.met} | asdict(record)) + "\n")
    (folder / "summary.json").write_text(json.dumps(summary(comparison), indent=2) + "\n")
