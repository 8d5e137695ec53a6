"""Which revision is tried with one token, and through which proxies."""

from __future__ import annotations

from flowprefill_operator.apply import Applied
from flowprefill_operator.controller.reconcile import to_prove
from flowprefill_operator.scene import scene
from flowprefill_operator.status.conditions import running
from flowprefill_operator.status.view import View
from support.simulated_cluster import UID, SimulatedCluster

NOW = "2026-03-01T12:00:00Z"


def asked(cluster: SimulatedCluster) -> tuple[str | None, set[str]]:
    """The revision that is tried now, and the revisions of the proxies that try it."""
    cluster.hear()
    now = scene(cluster.observed(), UID)
    view = View(
        service=cluster.service,
        now=NOW,
        scene=now,
        goal=cluster.goal(),
        applied=Applied(writes=0, failures=()),
    )
    proxies = {item.name: "10.0.0.1:9000" for item, pod in running(view) if pod.role == "proxy"}
    revision, provers = to_prove(view, frozenset(cluster.proven), proxies)
    return revision, {pod.revision for item, pod in now.pods if item.name in provers}


def test_a_revision_that_serves_is_tried_until_it_has_served_a_token() -> None:
    cluster = SimulatedCluster(1)
    first = cluster.ask()
    cluster.mute.add(first)
    cluster.settle()
    assert asked(cluster) == (first, {first})
    cluster.mute.clear()
    cluster.settle()
    assert asked(cluster) == (None, set())


def test_the_revision_before_is_tried_while_the_next_one_is_stuck_if_it_never_served() -> None:
    cluster = SimulatedCluster(1)
    first = cluster.ask()
    cluster.mute.add(first)
    cluster.settle()
    second = cluster.ask({"engine": {"kvCacheTokens": 4096}})
    cluster.sick.add(second)
    cluster.settle()
    assert asked(cluster) == (first, {first})
    cluster.proven.add(first)
    assert asked(cluster) == (None, set())
