"""Services in a simulated cluster, and their conditions read as `kubectl wait` and kstatus read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flowprefill_crd import Status
from flowprefill_crd.v1alpha1 import Condition
from flowprefill_operator.apply import Applied
from flowprefill_operator.scene import scene
from flowprefill_operator.status.compute import status_of
from flowprefill_operator.status.view import Reports, View
from support.services import Spec
from support.simulated_cluster import UID, SimulatedCluster

NOW = "2026-03-01T12:00:00Z"
OTHER: Spec = {"engine": {"kvCacheTokens": 4096}}


def view(cluster: SimulatedCluster, **changes: Any) -> View:
    """What the operator knows right now; with all pods on the live document of generation 1, unless told otherwise."""
    cluster.hear()
    now = scene(cluster.observed(), UID)
    reports = changes.pop("reports", Reports(generations={item.name: 1 for item, _ in now.pods}))
    return View(
        service=changes.pop("service", cluster.service),
        now=NOW,
        scene=now,
        goal=changes.pop("goal", cluster.goal()),
        applied=changes.pop("applied", Applied(writes=0, failures=())),
        reports=replace(reports, proven=frozenset(cluster.proven)),
        **changes,
    )


def conditions(of: View) -> dict[str, Condition]:
    return {c.type: c for c in status_of(of).conditions}


def kstatus(status: Status, generation: int) -> str:
    """As cli-utils computes it for a kind that it does not know (kstatus/status/generic.go, README)."""
    told = {c.type: c.status for c in status.conditions}
    if status.observed_generation != generation:
        return "InProgress"
    if told.get("Stalled") == "True":
        return "Failed"
    if told.get("Reconciling") == "True" or told["Ready"] != "True":
        return "InProgress"
    return "Current"


def told(of: View, name: str = "Ready") -> tuple[str, str, str]:
    """A condition's status and reason, and what kstatus makes of it all."""
    status = status_of(of)
    found = conditions(of)[name]
    return found.status, found.reason, kstatus(status, of.service.metadata.generation)


def serving(changes: Spec | None = None) -> tuple[SimulatedCluster, str]:
    cluster = SimulatedCluster(1)
    revision = cluster.ask(changes)
    cluster.settle()
    return cluster, revision


def starting(changes: Spec | None = None) -> tuple[SimulatedCluster, str]:
    """A service whose worker pods do not get ready."""
    cluster = SimulatedCluster(1)
    revision = cluster.ask(changes)
    cluster.sick.add(revision)
    cluster.settle()
    return cluster, revision


def prefill_pod(cluster: SimulatedCluster, revision: str, status: Mapping[str, Any]) -> str:
    """Give the first prefill pod a status; its name."""
    pod = cluster.members("prefill", revision)[0]
    pod["status"] = dict(status)
    pod["metadata"]["resourceVersion"] = "9999"
    return str(pod["metadata"]["name"])
