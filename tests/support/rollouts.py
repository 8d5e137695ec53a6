"""Services of which one revision replaces another, and what holds meanwhile and afterwards."""

from __future__ import annotations

from typing import Any

from flowprefill_operator.kinds import CLAIMS, RECORDS
from flowprefill_operator.resources.base import Object
from flowprefill_operator.revisions import key_of
from flowprefill_operator.rollout import Goal
from flowprefill_operator.settings import PlanSettings
from support.services import Spec, merged
from support.simulated_cluster import SimulatedCluster

SEEDS = range(3)
EVENTS = 250
"""Of a rollout; enough that most are over by then, and few are not."""

TWO: Spec = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}, "proxy": {"replicas": 2}}
OTHER: Spec = {"engine": {"kvCacheTokens": 4096}}
THIRD: Spec = {"engine": {"kvCacheTokens": 8192}}
RECREATE: Spec = {"rollout": {"strategy": "Recreate"}}
COLOCATED: Spec = {"mode": "Colocated"}
HF: Spec = {"model": {"uri": "hf://org/name", "cache": {"persistentVolumeClaim": {"storage": "1Gi"}}}}
PROFILED: Spec = {"scheduling": {"predictor": {"profilingJob": True}}}
AUTOSCALED: Spec = {"prefill": {"autoscaling": {"minReplicas": 1, "maxReplicas": 5}}}


def spec(*parts: Spec) -> Spec:
    found: Spec = {}
    for part in parts:
        found = merged(found, part)
    return found


def settled(seed: int, *parts: Spec, settings: PlanSettings | None = None) -> tuple[SimulatedCluster, str]:
    """A cluster in which one revision serves."""
    cluster = SimulatedCluster(seed, settings=settings)
    revision = cluster.ask(spec(*parts))
    cluster.settle()
    assert cluster.serves(revision)
    assert revision in cluster.proven
    return cluster, revision


def objects(goal: Goal) -> list[Object]:
    return [item for step in goal.steps for item in step]


def always_serves(*revisions: str) -> Any:
    """A watcher: one of the revisions has all its roles, and a proxy is ready."""

    def check(cluster: SimulatedCluster) -> None:
        assert any(cluster.serves(revision) for revision in revisions), "nothing serves"
        assert cluster.running("proxy"), "no proxy is ready"

    return check


def assert_rolled(cluster: SimulatedCluster, revision: str) -> None:
    """Nothing but this revision is left, and nothing is left to do."""
    goal = cluster.settle()
    assert (goal.target.name, goal.serving, goal.previous) == (revision, revision, None)
    assert (goal.prune, dict(goal.hand_over), goal.to_prove) == ((), {}, False)
    assert cluster.complete(revision)
    assert {r for (k, _), i in cluster.objects.items() if k != RECORDS and (r := revision_of(i))} == {
        revision
    }
    assert {revision_of(pod) for pod in cluster.pods.values()} == {revision}
    planned = {key_of(item) for item in objects(goal)}
    left = {key for key in cluster.objects if key[0] != RECORDS} - planned
    assert left <= {(CLAIMS, "example-model-cache")}, "a claim that is retained is the user's"
    assert objects(cluster.goal()) == objects(goal)


def revision_of(item: dict[str, Any]) -> str:
    return str(item["metadata"]["labels"].get("flowprefill.io/revision", ""))
