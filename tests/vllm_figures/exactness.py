"""What was paused computes what was not: the suites inside vLLM on every family, eager, compiled and on two ranks, as figures."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path

from flowprefill.bench.figures.row import Bench, Figure, Row

TESTS = Path(__file__).parents[1]


def _run(paths: Sequence[str], *, expression: str = "", matrix: bool = False) -> tuple[int, int, list[str]]:
    """Run these tests in a process of their own: how many ran, how many failed, and which."""
    with tempfile.TemporaryDirectory(prefix="flowprefill-figures-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += [*(["-k", expression] if expression else []), *(str(TESTS / path) for path in paths)]
        env = os.environ | ({"FLOWPREFILL_VLLM_MATRIX": "1"} if matrix else {})
        done = subprocess.run(command, env=env, cwd=TESTS.parent, capture_output=True, text=True, check=False)
        assert report.exists(), (
            f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
        cases = list(ET.parse(report).getroot().iter("testcase"))
    assert cases, f"no test matches {expression!r} in {', '.join(paths)}"
    bad = [case.get("name", "") for case in cases if any(c.tag in ("failure", "error") for c in case)]
    return len(cases), len(bad), bad


def exactness(bench: Bench) -> Iterator[Row]:
    """Each test compares logits, KV and tokens of recorded steps with those of the same steps without a pause."""
    bench.progress.step("all scenarios on all variants")
    num, failed, bad = _run(
        ["in_vllm/test_preemption.py", "in_vllm/test_tiles.py", "in_vllm/test_loop.py"], matrix=True
    )
    yield Row(
        name="vLLM: scenarios with outputs that differ from an uninterrupted run of the same recorded steps",
        value=failed,
        op="<=",
        bar=0,
        command="make figures SET=vllm ONLY=exactness",
        detail=f"{num} scenarios on three families: eager, compiled, two ranks; differing: {bad or 'none'}",
    )


def hazard(bench: Bench) -> Iterator[Row]:
    """The prefix-cache hazard with its cure switched off, on three families: the test sees wrong outputs."""
    bench.progress.step("the prefix cache without its cure")
    num, failed, bad = _run(["in_vllm/test_preemption.py"], expression="without_the_cure")
    yield Row(
        name="vLLM: wrong outputs in the prefix-cache hazard test with the cure switched off",
        value=num - failed,
        op=">=",
        bar=1,
        command="make figures SET=vllm ONLY=hazard",
        detail=f"{num} variants tried; not seen on: {bad or 'none'}",
    )


FIGURES = (
    Figure(
        name="exactness", summary="paused against unpaused steps, bit by bit", minutes=25.0, measure=exactness
    ),
    Figure(name="hazard", summary="the prefix cache without its cure", minutes=3.0, measure=hazard),
)
