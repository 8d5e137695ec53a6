"""What `status` shows."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from flowprefill.cli.screen import age, show
from flowprefill_operator.node.insight import ClassView, EngineView, View
from flowprefill_operator.node.state import NodeStatus, PodReport
from support.pod_reports import pod_report


def pod(name: str, **changes: Any) -> PodReport:
    return pod_report(name, ports={"api": 41000, "admin": 41001}, **changes)


def screen(*pods: PodReport, last_lines: dict[str, str] | None = None, met: int = 0, missed: int = 0) -> str:
    view = View(
        running=True,
        status=NodeStatus(
            service="chat", namespace="default", pid=1, started_at=0.0, url="http://127.0.0.1:8000", pods=pods
        ),
        policy="s-edf",
        classes=(
            ClassView(
                name="fast",
                ttft_milliseconds=500,
                objective="95",
                met=met,
                missed=missed,
                recently_met=0,
                recently_missed=0,
            ),
        ),
        generations={"p-0": 3},
        engines={"p-0": EngineView(waiting=2, kv_blocks=100, kv_blocks_free=25)},
        last_lines=last_lines or {},
    )
    out = io.StringIO()
    show([view], Console(file=out, width=160))
    return out.getvalue()


def test_a_pod_is_shown_with_its_ports_generation_queue_and_kv() -> None:
    line = next(
        line for line in screen(pod("p-0", ready=True)).splitlines() if line.strip().startswith("p-0")
    )
    for words in ("Ready", "api:41000", "admin:41001", "75% of 100 blocks"):
        assert words in line
    assert {"3", "2"} <= set(line.split())


def test_a_failing_pod_is_shown_with_its_reason_and_last_words() -> None:
    text = screen(
        pod("p-1", ready=False, phase="CrashLoopBackOff", message="exited with code 3", restarts=7),
        last_lines={"p-1": "no such file"},
    )
    for words in ("CrashLoopBackOff", "exited with code 3", "no such file", "7"):
        assert words in text


def test_attainment_is_a_share_of_slo_events_and_nothing_without_any() -> None:
    assert "66.7 %" in screen(met=2, missed=1)
    assert "%" not in screen().splitlines()[4].replace("95 %", "")


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0s"), (59.9, "59s"), (60, "1m"), (7199, "1h"), (200_000, "2d"), (-1, "0s")]
)
def test_ages_are_short(seconds: float, shown: str) -> None:
    assert age(seconds) == shown
