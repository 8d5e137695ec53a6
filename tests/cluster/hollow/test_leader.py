"""Two operators, one Lease: one works, the other stands by, and takes over when the first is gone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.control_plane.faults import FaultyApiServer
from support.control_plane.hollow import HollowNode
from support.control_plane.operated import Operated, admin_client, install_crd, simulated
from support.control_plane.operator_identity import SYSTEM_NAMESPACE, grant, kubeconfig
from support.control_plane.operator_process import OperatorProcess
from support.control_plane.plane import ControlPlane
from support.control_plane.waiting import until

LEASE_S = 6
ELECTION: dict[str, Any] = {"enabled": True, "leaseSeconds": LEASE_S}


def leads(operator: OperatorProcess) -> bool:
    found = re.search(r"^flowprefill_operator_leader (\d)", operator.metrics(), re.MULTILINE)
    return found is not None and found[1] == "1"


@pytest.fixture(scope="module")
def pair(
    plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Operated, OperatorProcess]]:
    """The operator that came first, with its surroundings, and the one that came second."""
    folder: Path = tmp_path_factory.mktemp("pair")
    install_crd(plane)
    grant(plane)
    with ExitStack() as stack:
        node = stack.enter_context(HollowNode(plane))
        faulty = stack.enter_context(FaultyApiServer(plane))
        credentials = kubeconfig(plane, faulty.url, folder / "operator.kubeconfig")
        first, second = (
            OperatorProcess(credentials, folder / name, pod_name=name, leaderElection=ELECTION)
            for name in ("first", "second")
        )
        stack.enter_context(first)
        until(lambda: leads(first), "the first operator leads")
        stack.enter_context(second)
        http = stack.enter_context(admin_client(plane))
        yield Operated(plane=plane, node=node, faulty=faulty, operator=first, http=http), second


def test_the_second_stands_by_ready_and_takes_over_when_the_first_is_killed(
    pair: tuple[Operated, OperatorProcess], namespace: str
) -> None:
    cluster, second = pair
    cluster.apply(namespace, simulated("before"))
    cluster.wait_ready(namespace, "before")
    assert not leads(second)
    cluster.operator.kill()
    cluster.operator.wait()
    cluster.apply(namespace, simulated("after"))
    until(lambda: leads(second), "the second operator leads", within_s=3 * LEASE_S)
    cluster.wait_ready(namespace, "after")
    lease = cluster.plane.get("lease", "flowprefill-operator", "-n", SYSTEM_NAMESPACE)
    assert lease["spec"]["holderIdentity"] == "second"

    # One that ends in order gives the Lease back, so that nobody waits for it to run out.
    cluster.operator.start()
    cluster.operator.wait_ready()
    assert second.stop() == 0
    lease = cluster.plane.get("lease", "flowprefill-operator", "-n", SYSTEM_NAMESPACE)
    assert lease["spec"].get("holderIdentity", "") != "second"
    until(lambda: leads(cluster.operator), "the first leads again", within_s=LEASE_S)


def test_an_operator_that_cannot_renew_its_lease_ends_and_comes_back_to_work(
    pair: tuple[Operated, OperatorProcess], namespace: str
) -> None:
    cluster, _ = pair
    until(lambda: leads(cluster.operator), "the first leads")
    cluster.faulty.refuse(500, resource="leases.coordination.k8s.io")
    until(lambda: not cluster.operator.running, "it has ended", within_s=5 * LEASE_S)
    assert cluster.operator.exit_status == 1
    cluster.faulty.heal()
    cluster.operator.start()
    cluster.operator.wait_ready()
    cluster.apply(namespace, simulated("later"))
    cluster.wait_ready(namespace, "later")


def test_an_operator_that_may_not_read_its_lease_is_not_ready(
    pair: tuple[Operated, OperatorProcess], namespace: str
) -> None:
    cluster, second = pair
    cluster.faulty.refuse(403, resource="leases.coordination.k8s.io")
    second.start()
    until(
        lambda: any("lease cannot be read" in line.get("message", "") for line in second.lines()),
        "it says so",
    )
    assert not second.answers("/readyz")
    assert second.answers("/healthz"), "a restart would not help"
    cluster.faulty.heal()
    second.wait_ready()
    second.stop()
