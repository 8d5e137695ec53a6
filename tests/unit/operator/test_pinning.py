"""One commit for all pods of a revision, in a simulated cluster whose branch moves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowprefill_operator.kinds import CONFIG_MAPS, DEPLOYMENTS, PODS
from flowprefill_operator.observe.observed import observe
from flowprefill_operator.pinning import commits
from flowprefill_operator.revisions import KEPT
from flowprefill_operator.scene import scene
from support.cluster_objects import ended, pod_status, running
from support.services import Spec, merged
from support.simulated_cluster import UID, SimulatedCluster

A, B, C = "a" * 40, "b" * 40, "c" * 40
HF: Spec = {"model": {"uri": "hf://org/name"}, "prefill": {"replicas": 2}, "decode": {"replicas": 2}}
SEEDS = range(3)


def other(tokens: int) -> Spec:
    return merged(HF, {"engine": {"kvCacheTokens": 4096 * tokens}})


def kept(cluster: SimulatedCluster) -> dict[str, str]:
    """What the cluster keeps, by revision."""
    return {
        item["metadata"]["labels"]["flowprefill.io/revision"]: item["data"]["commit"]
        for (kind, _), item in cluster.objects.items()
        if kind == CONFIG_MAPS and "commit" in item["data"]
    }


def told(cluster: SimulatedCluster, revision: str) -> set[str]:
    """The commits that the revision's pods have."""
    return {
        json.loads(init["state"]["terminated"]["message"])["commit"]
        for role in ("prefill", "decode")
        for pod in cluster.members(role, revision)
        for init in pod["status"]["initContainerStatuses"]
    }


def serving(seed: int) -> tuple[SimulatedCluster, str]:
    """A service whose first pods had the branch at A; it is at B now."""
    cluster = SimulatedCluster(seed)
    cluster.branch = A
    revision = cluster.ask(HF)
    cluster.settle()
    assert cluster.serves(revision)
    cluster.branch = B
    return cluster, revision


@pytest.mark.parametrize("seed", SEEDS)
def test_pods_that_come_later_have_the_commit_of_the_first_and_none_restarts_for_it(seed: int) -> None:
    cluster, revision = serving(seed)
    before = {
        key: json.dumps(i["spec"]["template"]) for key, i in cluster.objects.items() if key[0] == DEPLOYMENTS
    }
    pods = set(cluster.pods)
    assert kept(cluster) == {revision: A}
    assert cluster.ask(merged(HF, {"decode": {"replicas": 4}})) == revision
    cluster.settle()
    assert len(cluster.running("decode", revision)) == 4
    assert told(cluster, revision) == {A}
    assert pods <= set(cluster.pods)
    after = {
        key: json.dumps(i["spec"]["template"]) for key, i in cluster.objects.items() if key[0] == DEPLOYMENTS
    }
    assert after == before


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_kept_is_never_changed_in_any_order_of_events(seed: int) -> None:
    cluster = SimulatedCluster(seed)
    cluster.branch = A
    revision = cluster.ask(HF)
    seen: set[str] = set()
    cluster.watchers.append(lambda c: seen.update(kept(c).values()))
    for step in range(200):  # the branch moves all the while
        cluster.branch = (A, B, C)[step % 3]
        cluster.step()
    cluster.settle()
    assert len(seen) == 1
    assert set(kept(cluster)) == {revision}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_revision_that_is_replaced_keeps_its_commit_and_gets_it_back_when_somebody_deletes_it(
    seed: int,
) -> None:
    cluster, old = serving(seed)
    new = cluster.ask(other(1))
    cluster.sick.add(new)
    cluster.settle()
    assert kept(cluster) == {old: A, new: B}
    assert (told(cluster, old), told(cluster, new)) == ({A}, {B})
    for key in [key for key, item in cluster.objects.items() if "commit" in item.get("data", {})]:
        cluster.lose(key)
    cluster.settle()
    assert kept(cluster) == {old: A, new: B}


@pytest.mark.parametrize("seed", SEEDS)
def test_going_back_brings_back_the_weights_as_long_as_the_revision_is_recorded(seed: int) -> None:
    cluster, old = serving(seed)
    new = cluster.ask(other(1))
    cluster.steps(250)
    cluster.settle()
    assert cluster.of_revision(old)[0]["data"] == {"commit": A}, "nothing else of it is left"
    assert len(cluster.of_revision(old)) == 1
    assert cluster.ask(HF) == old
    cluster.settle()
    assert told(cluster, old) == {A}
    assert kept(cluster) == {old: A, new: B}
    for number in range(2, 3 + KEPT):
        cluster.ask(other(number))
        cluster.settle()
    assert old not in cluster.records()
    assert set(kept(cluster)) == set(cluster.records())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_no_client_is_sent_to_a_revision_with_two_commits_while_another_serves(role: str, seed: int) -> None:
    cluster, old = serving(seed)
    new = cluster.ask(other(1))
    cluster.sick.add(new)
    cluster.settle()
    stray = cluster.members(role, new)[0]
    stray["status"]["initContainerStatuses"][0]["state"]["terminated"]["message"] = said(C)
    cluster.hear()  # a pod has fetched its model long before it is ready
    cluster.sick.clear()
    cluster.watchers.append(lambda c: _old_serves(c, old))
    cluster.steps(250)
    goal = cluster.settle()
    assert cluster.complete(new)
    assert (goal.previous, kept(cluster)[new]) == (old, B)
    cluster.watchers.clear()
    del cluster.pods[stray["metadata"]["name"]]
    cluster.steps(250)
    goal = cluster.settle()
    assert (goal.previous, goal.serving, told(cluster, new)) == (None, new, {B})


def _old_serves(cluster: SimulatedCluster, old: str) -> None:
    assert cluster.running("proxy", old), "proxies of the new revision take the place of the old ones"
    assert cluster.serves(old)


def test_the_commit_belongs_to_the_service_and_is_no_part_of_what_was_rendered() -> None:
    cluster, _ = serving(1)
    (key,) = [key for key, item in cluster.objects.items() if "commit" in item.get("data", {})]
    assert cluster.objects[key]["metadata"]["ownerReferences"][0]["uid"] == UID
    records = [item for (kind, _), item in cluster.objects.items() if kind.kind == "ControllerRevision"]
    assert A not in json.dumps(records)


def pod(name: str, created: str, message: str, *, role: str = "prefill", code: int = 0) -> dict[str, Any]:
    """A pod of revision `rev` whose model container has ended."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": name,
            "resourceVersion": "1",
            "creationTimestamp": f"2026-01-01T00:00:{created}Z",
            "labels": {"flowprefill.io/role": role, "flowprefill.io/revision": "rev"},
        },
        "status": pod_status(running(), init=(ended(code, "Completed", message, name="model"),)),
    }


def said(commit: str) -> str:
    return json.dumps({"commit": commit})


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ([pod("x", "02", said(A)), pod("y", "01", said(B))], {"rev": B}),
        ([pod("y", "01", said(A)), pod("x", "01", said(B))], {"rev": B}),
        ([pod("x", "01", said(A), code=1), pod("y", "02", said(B))], {"rev": B}),
        ([pod("x", "01", ""), pod("y", "02", said(B))], {"rev": B}),
        ([pod("x", "01", said("main")), pod("y", "02", said(B))], {"rev": B}),
        ([pod("x", "01", '["commit"]'), pod("y", "02", '"commit"')], {}),
        ([pod("x", "01", said(A), role="profiler"), pod("y", "02", said(B), role="decode")], {"rev": B}),
        ([], {}),
    ],
)
def test_the_oldest_pod_that_has_fetched_the_model_decides(
    pods: list[dict[str, Any]], expected: dict[str, str]
) -> None:
    for order in (pods, pods[::-1]):
        observed = {(PODS, p["metadata"]["name"]): observe(PODS, p) for p in order}
        assert commits(scene(observed, UID)) == expected
