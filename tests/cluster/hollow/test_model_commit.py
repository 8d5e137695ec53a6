"""One commit of a hub's model for all pods of a revision, against a real API server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowprefill_operator.kinds import CONFIG_MAPS
from support.control_plane.hollow_behaviour import Runs
from support.control_plane.operated import Operated, simulated
from support.control_plane.waiting import until

Json = dict[str, Any]

A, B = "a" * 40, "b" * 40
MODEL = {"uri": "hf://org/model"}


def kept(cluster: Operated, namespace: str) -> dict[str, Json]:
    """ConfigMaps with a commit, by revision."""
    return {
        item["metadata"]["labels"]["flowprefill.io/revision"]: item
        for item in cluster.list(CONFIG_MAPS, namespace)
        if "commit" in item.get("data", {})
    }


def told_to(cluster: Operated, namespace: str, pod: Json) -> str | None:
    """The commit that a kubelet would put into the environment of the pod's init container now."""
    (init,) = pod["spec"]["initContainers"]
    (ref,) = [
        v["valueFrom"]["configMapKeyRef"] for v in init["env"] if v["name"] == "FLOWPREFILL_MODEL_COMMIT"
    ]
    found = cluster.get(CONFIG_MAPS, namespace, ref["name"])
    assert ref["optional"]
    return None if found is None else found["data"][ref["key"]]


def fetches(commit: str) -> Runs:
    return Runs(init_message=json.dumps({"commit": commit}))


def shown(cluster: Operated, namespace: str) -> str | None:
    commit: str | None = cluster.service(namespace, "web")["status"]["resolvedModel"].get("revision")
    return commit


def test_the_first_pods_commit_is_kept_told_to_later_pods_and_shown_and_one_that_strays_is_named(
    cluster: Operated, namespace: str
) -> None:
    cluster.node.behave(fetches(A), namespace=namespace)
    created = cluster.apply(namespace, simulated("web", model=MODEL))
    cluster.wait_ready(namespace, "web")
    until(lambda: shown(cluster, namespace) == A or None, "the commit is shown")
    ((revision, item),) = kept(cluster, namespace).items()
    assert (item["metadata"]["name"], item["data"]) == (f"web-{revision}-model", {"commit": A})
    assert item["immutable"] is True
    assert item["metadata"]["ownerReferences"][0]["uid"] == created["metadata"]["uid"]
    with pytest.raises(AssertionError, match="immutable"):
        cluster.edit(CONFIG_MAPS, namespace, item["metadata"]["name"], {"data": {"commit": B}})

    # The branch has moved, and a pod that does not do as it is told fetches what it is now.
    (before,) = cluster.pods(namespace, "web", "decode")
    rule = cluster.node.behave(
        fetches(B),
        namespace=namespace,
        role="decode",
        predicate=lambda pod: pod["metadata"]["name"] != before["metadata"]["name"],
    )
    cluster.plane.kubectl("delete", "pod", before["metadata"]["name"], "-n", namespace, "--wait=false")
    told = cluster.wait_condition(namespace, "web", "DecodeReady", "False", reason="ModelRevisionsDiffer")
    (stray,) = cluster.pods(namespace, "web", "decode")
    assert told_to(cluster, namespace, stray) == A
    assert all(part in told["message"] for part in (stray["metadata"]["name"], A, B, "delete the pod"))
    cluster.wait_condition(namespace, "web", "Ready", "False", reason="ModelRevisionsDiffer")
    assert "Stalled" in cluster.conditions(namespace, "web")
    assert (kept(cluster, namespace)[revision]["data"], shown(cluster, namespace)) == ({"commit": A}, A)

    cluster.node.forget(rule)
    cluster.plane.kubectl("delete", "pod", stray["metadata"]["name"], "-n", namespace, "--wait=false")
    cluster.wait_condition(namespace, "web", "DecodeReady", "True")
    cluster.wait_ready(namespace, "web")


def test_the_commit_comes_back_when_it_is_deleted_and_with_the_revision(
    cluster: Operated, namespace: str
) -> None:
    rule = cluster.node.behave(fetches(A), namespace=namespace)
    cluster.apply(namespace, simulated("web", model=MODEL))
    cluster.wait_ready(namespace, "web")
    (old,) = until(lambda: kept(cluster, namespace), "the commit is kept")
    before = kept(cluster, namespace)[old]["metadata"]
    cluster.delete(CONFIG_MAPS, namespace, before["name"])

    def again() -> bool:
        found = kept(cluster, namespace).get(old)
        return found is not None and found["metadata"]["uid"] != before["uid"]

    until(lambda: again() or None, "the commit is kept again")
    assert kept(cluster, namespace)[old]["data"] == {"commit": A}

    cluster.node.forget(rule)
    cluster.node.behave(
        fetches(B),
        namespace=namespace,
        predicate=lambda pod: pod["metadata"]["labels"].get("flowprefill.io/revision") != old,
    )
    cluster.change(namespace, "web", {"engine": {"kvCacheTokens": 8192}})
    cluster.wait_ready(namespace, "web")
    until(lambda: shown(cluster, namespace) == B or None, "the new revision's commit is shown")
    assert {item["data"]["commit"] for item in kept(cluster, namespace).values()} == {A, B}
    cluster.change(namespace, "web", {"engine": {"kvCacheTokens": None}})
    cluster.wait_ready(namespace, "web")
    until(lambda: cluster.revisions(namespace, "web") == {old}, "the other revision's pods are gone")
    for pod in cluster.pods(namespace, "web", "prefill"):
        assert told_to(cluster, namespace, pod) == A
    until(lambda: shown(cluster, namespace) == A or None, "the first revision's commit is shown again")
