"""What is seen of a service whose pods do not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowprefill_operator.node.insight import look
from flowprefill_operator.node.logs import note
from flowprefill_operator.node.state import ContainerReport, NodeStatus, StateDir
from support.pod_reports import pod_report


@pytest.mark.parametrize(
    ("log", "last"),
    [
        (["loading", "out of memory", note("exited with code 3, restart 1 in 0 s")], "out of memory"),
        (["-- two dashes are the container's own"], "-- two dashes are the container's own"),
        ([note("no executable 'x' on this machine")], None),
    ],
)
def test_the_last_line_of_a_pod_is_its_own_not_a_note_of_the_node(
    tmp_path: Path, log: list[str], last: str | None
) -> None:
    state = StateDir(tmp_path, namespace="default", name="a").create()
    path = state.logs / "a-0.main.log"
    path.write_text("\n".join(log) + "\n")
    container = ContainerReport(
        name="main",
        phase="CrashLoopBackOff",
        ready=False,
        restarts=1,
        pid=None,
        message="exited with code 3",
        log=str(path),
    )
    pod = pod_report(
        "a-0",
        phase="CrashLoopBackOff",
        ready=False,
        restarts=1,
        message="exited with code 3",
        containers=(container,),
    )
    state.write_status(NodeStatus(service="a", namespace="default", pid=1, started_at=0.0, pods=(pod,)))
    with state.lock("supervisor", wait_s=0):
        found = look(state).last_lines
    assert found.get("a-0") == last
