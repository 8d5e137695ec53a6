"""How a role's pods are told while their number is on its way."""

from __future__ import annotations

from typing import Any

import pytest

from flowprefill_operator.apply import Applied, Failure
from flowprefill_operator.kinds import CLAIMS
from flowprefill_operator.scene import scene
from flowprefill_operator.status.compute import as_json, status_of
from flowprefill_operator.status.pods import role_verdict
from flowprefill_operator.status.verdict import Verdict
from flowprefill_operator.status.view import View
from support.cluster_objects import refused
from support.simulated_cluster import UID, SimulatedCluster

REPLICAS = 2


def told(**status: Any) -> tuple[Verdict, dict[str, Any]]:
    """The verdict about the prefill pods and what `status.roles.prefill` says, when 2 are asked for and a Deployment
    counts like this."""
    cluster = SimulatedCluster(1)
    revision = cluster.ask({"prefill": {"replicas": REPLICAS}})
    cluster.settle()
    deployment = cluster.deployment("prefill", revision)
    assert deployment is not None
    deployment["status"] |= status
    deployment["metadata"]["resourceVersion"] = "9999"
    cluster.hear()
    view = View(
        service=cluster.service,
        now="2026-03-01T12:00:00Z",
        scene=scene(cluster.observed(), UID),
        goal=cluster.goal(),
        applied=None,
    )
    return role_verdict(view, "prefill", revision), as_json(status_of(view))["roles"]["prefill"]


@pytest.mark.parametrize(
    ("status", "message"),
    [
        pytest.param(
            {"replicas": 4, "updatedReplicas": 4, "readyReplicas": 4},
            "2 of 2 pods are ready, and 2 more are still to go",
            id="fewer are asked for",
        ),
        pytest.param(
            {"replicas": 3, "updatedReplicas": 2, "readyReplicas": 3},
            "2 of 2 pods are ready, and 1 more is still to go",
            id="the last old one has not gone",
        ),
        pytest.param(
            {"replicas": 3, "updatedReplicas": 1, "readyReplicas": 2},
            "2 of 2 pods are ready, and 1 is still to be replaced",
            id="half are of the old template",
        ),
        pytest.param(
            {"observedGeneration": 0},
            "2 of 2 pods are ready, and the last change has not reached them yet",
            id="the Deployment's controller has not looked yet",
        ),
        pytest.param(
            {"replicas": 1, "updatedReplicas": 1, "readyReplicas": 1},
            "1 of 2 pods are ready",
            id="one is not made yet",
        ),
    ],
)
def test_what_keeps_a_role_waiting_is_told_beside_the_number_of_ready_pods(
    status: dict[str, int], message: str
) -> None:
    verdict, _ = told(**status)
    assert (verdict.status, verdict.reason, verdict.message) == ("False", "PodsStarting", message)


def test_no_more_pods_are_told_as_ready_than_are_asked_for() -> None:
    verdict, role = told(replicas=2, updatedReplicas=2, readyReplicas=4)
    assert (verdict.status, verdict.message) == ("True", "2 of 2 pods are ready")
    assert (role["readyReplicas"], role["replicas"], role["summary"]) == (2, 2, "2/2")


def test_a_deployment_that_is_not_made_because_of_another_object_says_so() -> None:
    cluster = SimulatedCluster(1)
    cluster.ask()
    cluster.settle()
    new = cluster.ask({"engine": {"kvCacheTokens": 4096}})
    error = refused(422, "Invalid", "spec is immutable")
    blocked = Applied(writes=0, failures=(Failure(kind=CLAIMS, name="example-model-cache", error=error),))
    told = {
        applied: role_verdict(
            View(
                service=cluster.service,
                now="2026-03-01T12:00:00Z",
                scene=scene(cluster.observed(), UID),
                goal=cluster.goal(),
                applied=applied,
            ),
            "prefill",
            new,
        ).message
        for applied in (Applied(writes=0, failures=()), blocked)
    }
    assert list(told.values()) == [
        f"revision {new} has no Deployment yet",
        f"revision {new} has no Deployment yet; it is made once the objects before it could be applied",
    ]
