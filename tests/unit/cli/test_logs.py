"""Which service and which pods `logs` shows."""

from __future__ import annotations

import os
from pathlib import Path

from typer.testing import CliRunner

from flowprefill.cli import app
from flowprefill_operator.node.state import NodeStatus, StateDir
from support.pod_reports import pod_report

POD = pod_report("first-prefill-48ab-0")


def service(root: Path, name: str, *, ran_at: int) -> StateDir:
    """A service that ran once, with a log of each of two pods."""
    state = StateDir(root, namespace="default", name=name).create()
    state.service.touch()
    for pod in ("prefill-48ab-0", "decode-48ab-0"):
        (state.logs / f"{name}-{pod}.main.log").write_text(f"{name} {pod}\n")
    state.supervisor_log.touch()
    os.utime(state.supervisor_log, (ran_at, ran_at))
    return state


def shown(root: Path, *args: str) -> str:
    done = CliRunner().invoke(app, ["logs", *args, "--state-dir", str(root)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_where_nothing_runs_the_service_that_ran_last_is_shown(tmp_path: Path) -> None:
    service(tmp_path, "a", ran_at=1000)
    service(tmp_path, "b", ran_at=3000)
    service(tmp_path, "c", ran_at=2000)
    assert shown(tmp_path, "prefill") == "b prefill-48ab-0\n"


def test_a_service_that_never_came_to_run_is_not_the_last(tmp_path: Path) -> None:
    service(tmp_path, "a", ran_at=1000)
    service(tmp_path, "b", ran_at=2000).supervisor_log.unlink()
    assert shown(tmp_path, "prefill") == "a prefill-48ab-0\n"


def test_a_pod_is_found_by_its_name_with_and_without_the_services(tmp_path: Path) -> None:
    state = service(tmp_path, "first", ran_at=1000)
    status = NodeStatus(service="first", namespace="default", pid=1, started_at=0.0, pods=(POD,))
    state.write_status(status)  # as while it runs: the roles of its pods are known
    for words in ("prefill", "prefill-48", "first-prefill-48", "prefill-48ab-0"):
        assert shown(tmp_path, words) == "first prefill-48ab-0\n", words
