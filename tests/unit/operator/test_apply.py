"""How a goal is brought about, against objects behind a small API. Ownership itself is tested on real API servers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from flowprefill_crd import parse_service
from flowprefill_operator.apply import Applied, Applier
from flowprefill_operator.cluster.client import Cluster
from flowprefill_operator.cluster.errors import Forbidden, Invalid
from flowprefill_operator.kinds import DEPLOYMENTS, WATCHED, Kind
from flowprefill_operator.observe.store import Store
from flowprefill_operator.rollout import goal
from flowprefill_operator.settings import PlanSettings
from support.cluster_objects import status_body
from support.kept_objects import KeptObjects
from support.services import MINIMAL_SPEC, Spec, document, merged
from support.small_api import Answer, Request, SmallApi, small_api

UID = "uid-of-the-service"
OWNER = ("ns", "example")
KEDA: Spec = {
    "prefill": {"autoscaling": {"maxReplicas": 3, "provider": "Keda", "prometheusAddress": "http://p:9090"}}
}
CLAIM: Spec = {
    "model": {
        "uri": "hf://org/name",
        "cache": {"persistentVolumeClaim": {"storage": "1Gi", "retain": True}},
    }
}


class Passes:
    """An operator's passes over one service."""

    def __init__(self, api: SmallApi, cluster: Cluster) -> None:
        self.objects = KeptObjects(api)
        self.cluster = cluster
        self.absent: set[Kind] = set()
        self.restart()

    def restart(self) -> None:
        """Another operator process, which looks at everything first."""
        self.store = Store(lambda owner: None)
        self.applier = Applier(self.cluster, self.store, served=lambda kind: kind not in self.absent)
        self.look()

    def look(self) -> None:
        for kind in WATCHED:
            items = [
                item
                for (k, _, _), item in self.objects.items.items()
                if k == kind and "flowprefill.io/service" in item["metadata"].get("labels", {})
            ]
            self.store.replace(kind, items, "1000000", namespace=None)

    async def run(self, changes: Spec | None = None, *, uid: str = UID) -> Applied:
        service = parse_service(document(merged(MINIMAL_SPEC, changes or {}), namespace="ns", uid=uid))
        decided = goal(service, PlanSettings(), self.store.of(OWNER), frozenset())
        return await self.applier.bring_about(decided, namespace="ns", label="example", uid=uid)


@pytest.fixture
async def passes() -> AsyncIterator[Passes]:
    async with small_api() as (api, cluster):
        yield Passes(api, cluster)


def refuse(plural: str, status: int, message: str = "no", *, method: str = "PATCH") -> Any:
    def answer(request: Request) -> Answer | None:
        if request.method == method and f"/{plural}/" in request.path and "dryRun" not in request.query:
            return status, status_body(status, "", message)
        return None

    return answer


async def test_what_is_wanted_is_made_in_order_and_not_written_again(passes: Passes) -> None:
    done = await passes.run()
    writes = passes.objects.writes()
    assert (done.writes, done.failures) == (len(writes), ())
    kinds = [write.split()[1].partition("/")[0] for write in writes]
    assert kinds[0] == "controllerrevisions" or kinds[1] == "controllerrevisions"
    assert kinds.index("roles") < kinds.index("rolebindings")
    last_reference = max(
        i for i, kind in enumerate(kinds) if kind in ("configmaps", "serviceaccounts", "services")
    )
    assert last_reference < kinds.index("deployments")
    assert (await passes.run()).writes == 0
    assert passes.objects.writes() == []


async def test_another_operator_writes_nothing_either(passes: Passes) -> None:
    await passes.run()
    passes.restart()
    passes.objects.writes()
    assert (await passes.run()).writes == 0
    assert passes.objects.writes() == []


async def test_what_is_no_longer_wanted_goes(passes: Passes) -> None:
    await passes.run({"prefill": {"replicas": 2}})
    assert "example-prefill" in passes.objects.names("PodDisruptionBudget")
    passes.objects.writes()
    await passes.run()
    assert passes.objects.names("PodDisruptionBudget") == set()
    assert [write for write in passes.objects.writes() if write.startswith("DELETE")] == [
        "DELETE poddisruptionbudgets/example-prefill"
    ]


async def test_somebody_else_s_object_of_the_same_name_is_left_alone_and_told(passes: Passes) -> None:
    theirs = passes.objects.add(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "example-proxy", "namespace": "ns", "labels": {}},
            "spec": {"selector": {"app": "theirs"}},
        }
    )
    before = json.dumps(theirs)
    done = await passes.run()
    (failure,) = done.failures
    assert (failure.kind.kind, failure.name, failure.error.reason) == (
        "Service",
        "example-proxy",
        "NameConflict",
    )
    assert json.dumps(passes.objects.find("Service", "example-proxy")) == before


@pytest.mark.parametrize("labelled", [True, False])
async def test_an_object_of_another_service_is_somebody_else_s_whatever_its_labels(
    passes: Passes, labelled: bool
) -> None:
    """A service of the same name that was deleted and made again, while its objects are still there."""
    await passes.run(uid="uid-of-the-one-before")
    if not labelled:
        found = passes.objects.find("ConfigMap", "example-live")
        assert found is not None
        found["metadata"]["labels"] = {}
    passes.restart()
    before = json.dumps(passes.objects.find("ConfigMap", "example-live"))
    done = await passes.run()
    assert {failure.error.reason for failure in done.failures} == {"NameConflict"}
    assert json.dumps(passes.objects.find("ConfigMap", "example-live")) == before


async def test_a_name_that_is_becoming_free_is_waited_for(passes: Passes) -> None:
    await passes.run(uid="uid-of-the-one-before")
    for item in passes.objects.items.values():
        item["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    passes.restart()
    done = await passes.run()
    assert {failure.error.reason for failure in done.failures} == {"BeingDeleted"}
    passes.objects.items.clear()
    passes.restart()
    assert (await passes.run()).failures == ()


async def test_a_claim_that_an_earlier_service_left_behind_is_taken_over_and_a_stranger_s_is_not(
    passes: Passes,
) -> None:
    await passes.run(CLAIM, uid="uid-of-the-one-before")
    claim = passes.objects.find("PersistentVolumeClaim", "example-model-cache")
    assert claim is not None
    assert "ownerReferences" not in claim["metadata"]
    passes.objects.items = {k: v for k, v in passes.objects.items.items() if v is claim}
    passes.restart()
    assert (await passes.run(CLAIM)).failures == ()
    taken = passes.objects.find("PersistentVolumeClaim", "example-model-cache")
    assert taken is not None
    assert taken["metadata"]["labels"]["flowprefill.io/owner-uid"] == UID
    passes.objects.items.clear()
    passes.objects.add(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {
                "name": "example-model-cache",
                "namespace": "ns",
                "labels": {"flowprefill.io/service": "example"},
            },
            "spec": {},
        }
    )
    passes.restart()
    (failure,) = (await passes.run(CLAIM)).failures
    assert (failure.kind.kind, failure.error.reason) == ("PersistentVolumeClaim", "NameConflict")


async def test_nothing_new_begins_on_what_could_not_be_made_and_what_runs_is_still_mended(
    passes: Passes,
) -> None:
    passes.objects.refuse = refuse(
        "configmaps", 403, 'x is forbidden: User "o" cannot patch resource "configmaps"'
    )
    done = await passes.run()
    assert {failure.kind.kind for failure in done.failures} == {"ConfigMap"}
    assert isinstance(done.failures[0].error, Forbidden)
    assert passes.objects.names("Deployment") == set()
    assert passes.objects.names("Service") != set(), "one group is tried as a whole"
    passes.objects.refuse = lambda request: None
    assert (await passes.run()).failures == ()
    # Now that it runs, a Deployment is mended although a ConfigMap is not.
    proxy = passes.objects.find("Deployment", "example-proxy")
    assert proxy is not None
    proxy["metadata"]["labels"]["app.kubernetes.io/name"] = "theirs"
    del proxy["metadata"]["managedFields"][0]["fieldsV1"]["f:metadata"]["f:labels"][
        "f:app.kubernetes.io/name"
    ]
    passes.objects.add(proxy)
    passes.restart()
    passes.objects.refuse = refuse("configmaps", 500)
    done = await passes.run({"sloClasses": [{"name": "chat", "ttftMilliseconds": 5, "default": True}]})
    assert [failure.name for failure in done.failures] == ["example-live"]
    mended = passes.objects.find("Deployment", "example-proxy")
    assert mended is not None
    assert mended["metadata"]["labels"]["app.kubernetes.io/name"] == "flowprefill"


async def test_nothing_is_pruned_while_something_could_not_be_made(passes: Passes) -> None:
    await passes.run({"prefill": {"replicas": 2}})
    passes.objects.refuse = refuse("deployments", 500)
    done = await passes.run({"prefill": {"replicas": 1}})
    assert done.failures
    assert passes.objects.names("PodDisruptionBudget") == {"example-prefill"}
    passes.objects.refuse = lambda request: None
    assert (await passes.run({"prefill": {"replicas": 1}})).failures == ()
    assert passes.objects.names("PodDisruptionBudget") == set()


async def test_an_object_whose_api_is_not_there_is_left_out_and_told_and_made_when_it_is(
    passes: Passes,
) -> None:
    (scaled,) = {kind for kind in WATCHED if kind.kind == "ScaledObject"}
    passes.absent.add(scaled)
    done = await passes.run(KEDA)
    assert [item["kind"] for item in done.absent] == ["ScaledObject"]
    assert done.failures == ()
    assert passes.objects.names("Deployment") != set()
    passes.absent.clear()
    done = await passes.run(KEDA)
    assert (done.absent, passes.objects.names("ScaledObject")) == ((), {"example-prefill"})


async def test_the_number_of_pods_is_co_owned_before_it_is_given_up(passes: Passes) -> None:
    await passes.run({"prefill": {"replicas": 3}})
    name = next(iter(n for n in passes.objects.names("Deployment") if "prefill" in n))
    requests = passes.objects._api.requests
    requests.clear()
    await passes.run({"prefill": {"autoscaling": {"maxReplicas": 5}}})
    seen = [r for r in requests if r.path.endswith(f"/deployments/{name}")]
    assert [r.query["fieldManager"] for r in seen] == [
        "flowprefill-operator-replicas",
        "flowprefill-operator",
    ]
    assert seen[0].body["spec"] == {"replicas": 3}
    assert "replicas" not in seen[1].body["spec"]


async def test_a_hand_over_that_fails_leaves_the_number_of_pods_with_the_operator(passes: Passes) -> None:
    await passes.run({"prefill": {"replicas": 3}})
    name = next(iter(n for n in passes.objects.names("Deployment") if "prefill" in n))
    passes.objects.refuse = lambda request: (
        (500, b"") if request.query.get("fieldManager") == "flowprefill-operator-replicas" else None
    )
    done = await passes.run({"prefill": {"autoscaling": {"maxReplicas": 5}}})
    assert [failure.name for failure in done.failures] == [name]
    found = passes.objects.find("Deployment", name)
    assert found is not None
    assert found["spec"]["replicas"] == 3
    assert "f:replicas" in found["metadata"]["managedFields"][0]["fieldsV1"]["f:spec"]


async def test_fields_of_others_that_contradict_the_operator_s_are_taken_out_and_those_allocated_are_kept(
    passes: Passes,
) -> None:
    await passes.run()
    service = passes.objects.find("Service", "example-proxy")
    assert service is not None
    service["spec"] |= {
        "clusterIP": "10.0.0.7",
        "sessionAffinityConfig": {"clientIP": {}},
        "type": "ExternalName",
    }
    del service["metadata"]["managedFields"][0]["fieldsV1"]["f:spec"]["f:type"]
    passes.objects.add(service)
    passes.restart()
    refused = iter([(422, status_body(422, "Invalid", "spec: contradicts itself"))])
    passes.objects.refuse = lambda request: (
        next(refused, None)
        if request.content_type.startswith("application/apply") and "/services/" in request.path
        else None
    )
    assert (await passes.run()).failures == ()
    mended = passes.objects.find("Service", "example-proxy")
    assert mended is not None
    assert mended["spec"]["clusterIP"] == "10.0.0.7"
    assert mended["spec"]["type"] == "ClusterIP"
    assert "sessionAffinityConfig" not in mended["spec"]


async def test_a_new_object_that_is_not_acceptable_is_told(passes: Passes) -> None:
    passes.objects.refuse = refuse("deployments", 422, "spec.template: Invalid value")
    done = await passes.run()
    assert {type(failure.error) for failure in done.failures} == {Invalid}
    assert {failure.kind for failure in done.failures} == {DEPLOYMENTS}


async def test_a_dry_run_tells_the_first_refusal_and_changes_nothing(passes: Passes) -> None:
    service = parse_service(document(namespace="ns", uid=UID))
    decided = goal(service, PlanSettings(), {}, frozenset())
    items = [item for step in decided.steps for item in step]
    assert await passes.applier.dry_run(items) is None
    assert passes.objects.items == {}
    passes.objects.refuse = lambda request: (422, b"") if request.path.endswith("/example-proxy") else None
    failure = await passes.applier.dry_run(items)
    assert failure is not None
    assert failure.name == "example-proxy"
