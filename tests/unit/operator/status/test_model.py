"""The model that the status names, and pods that have another one than their revision."""

from __future__ import annotations

import json

import pytest

from flowprefill_crd.v1alpha1 import Condition, ResolvedModel
from flowprefill_operator.apply import Applied
from flowprefill_operator.scene import scene
from flowprefill_operator.status.compute import status_of
from flowprefill_operator.status.view import Reports, View
from support.services import Spec, merged
from support.simulated_cluster import UID, SimulatedCluster

A, B = "a" * 40, "b" * 40
HF: Spec = {"model": {"uri": "hf://org/name@v1"}}
OTHER: Spec = {"engine": {"kvCacheTokens": 4096}}


def view(cluster: SimulatedCluster, *, refused: bool = False) -> View:
    cluster.hear()
    now = scene(cluster.observed(), UID)
    return View(
        service=cluster.service,
        now="2026-03-01T12:00:00Z",
        scene=now,
        goal=None if refused else cluster.goal(),
        applied=None if refused else Applied(writes=0, failures=()),
        refusal=("MultiNodeUnsupported", "no") if refused else None,
        reports=Reports(proven=frozenset(cluster.proven), generations={item.name: 1 for item, _ in now.pods}),
    )


def model(cluster: SimulatedCluster, *, refused: bool = False) -> ResolvedModel:
    found = status_of(view(cluster, refused=refused)).resolved_model
    assert found is not None
    return found


def conditions(cluster: SimulatedCluster) -> dict[str, Condition]:
    return {c.type: c for c in status_of(view(cluster)).conditions}


def serving(changes: Spec) -> tuple[SimulatedCluster, str]:
    cluster = SimulatedCluster(1)
    cluster.branch = A
    revision = cluster.ask(changes)
    cluster.settle()
    return cluster, revision


def test_the_commit_is_told_as_soon_as_a_pod_has_the_model_and_stays_when_the_branch_moves() -> None:
    cluster = SimulatedCluster(1)
    cluster.ask(HF)
    cluster.settle()
    assert model(cluster) == ResolvedModel(uri="hf://org/name@v1", served_name="org/name")
    cluster, _ = serving(HF)
    cluster.branch = B
    assert model(cluster).revision == A
    cluster.pods.clear()
    assert model(cluster).revision == A


def test_a_model_that_is_not_downloaded_has_no_commit() -> None:
    cluster, _ = serving({})
    assert model(cluster).revision is None


def test_while_a_revision_is_replaced_the_model_is_the_one_that_serves() -> None:
    cluster, old = serving(HF)
    cluster.branch = B
    new = cluster.ask({"model": {"uri": "hf://org/other", "servedName": "chat"}})
    cluster.sick.add(new)
    cluster.settle()
    shown = ResolvedModel(uri="hf://org/name@v1", revision=A, served_name="org/name")
    assert cluster.goal().previous == old
    assert model(cluster) == shown
    assert model(cluster, refused=True) == shown
    cluster.sick.clear()
    cluster.settle()
    assert model(cluster) == ResolvedModel(uri="hf://org/other", revision=B, served_name="chat")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_pod_with_another_commit_than_its_revision_needs_somebody_until_it_is_gone(role: str) -> None:
    cluster, revision = serving(HF)
    assert conditions(cluster)["Ready"].status == "True"
    (pod,) = cluster.members(role, revision)
    (init,) = pod["status"]["initContainerStatuses"]
    init["state"]["terminated"]["message"] = json.dumps({"commit": B})
    cluster.settle()
    found = conditions(cluster)
    name = {"prefill": "PrefillReady", "decode": "DecodeReady"}[role]
    told = found[name]
    assert (told.status, told.reason) == ("False", "ModelRevisionsDiffer")
    for part in (pod["metadata"]["name"], A, B, revision, "delete the pod"):
        assert part in told.message
    assert (found["Ready"].reason, found["Stalled"].status) == ("ModelRevisionsDiffer", "True")
    assert {c.reason for c in found.values()} & {"PodsReady"}, "the other role is as it should be"
    del cluster.pods[pod["metadata"]["name"]]
    cluster.settle()
    found = conditions(cluster)
    assert (found["Ready"].status, found[name].reason) == ("True", "PodsReady")


def test_pods_of_two_revisions_may_have_two_commits() -> None:
    cluster, _ = serving(HF)
    cluster.branch = B
    cluster.ask(merged(HF, OTHER))
    cluster.settle()
    assert conditions(cluster)["Ready"].status == "True"
    assert model(cluster).revision == B
