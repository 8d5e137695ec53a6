"""A look at everything: what it finds that watches have missed, and what it does without."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from flowprefill_operator.apply import Applier
from flowprefill_operator.cluster.client import Cluster
from flowprefill_operator.cluster.errors import Unavailable
from flowprefill_operator.controller import resync as module
from flowprefill_operator.controller.metrics import OperatorMetrics
from flowprefill_operator.controller.mounts import Mounts
from flowprefill_operator.controller.queue import WorkQueue
from flowprefill_operator.controller.resync import Resync
from flowprefill_operator.controller.services import Services
from flowprefill_operator.controller.surroundings import Surroundings
from flowprefill_operator.kinds import CONFIG_MAPS, DEPLOYMENTS, OWNED, SERVICES, Kind
from flowprefill_operator.observe.store import Store
from support.cluster_objects import owned_object, status_body
from support.kept_objects import KeptObjects
from support.services import document
from support.small_api import Answer, Request, SmallApi, small_api

OPTIONAL = {kind for kind in OWNED if kind.optional}


@dataclass(slots=True)
class Looking:
    api: SmallApi
    objects: KeptObjects
    resync: Resync
    appeared: list[bool] = field(default_factory=list)
    """One entry for each time that watches had to begin anew."""

    @property
    def surroundings(self) -> Surroundings:
        return self.resync.surroundings

    def known(self) -> set[str]:
        return {name for _, name in self.resync.store.of(("ns", "example"))}

    def metric(self, name: str, **labels: str) -> float | None:
        return self.resync.metrics.registry.get_sample_value(f"flowprefill_operator_{name}", labels)


def looking(api: SmallApi, cluster: Cluster, *, namespaces: tuple[str, ...] = ()) -> Looking:
    surroundings, store = Surroundings(), Store(lambda owner: None)
    resync = Resync(
        cluster=cluster,
        services=Services(),
        store=store,
        applier=Applier(cluster, store, served=surroundings.serves),
        mounts=Mounts(cluster),
        queue=WorkQueue(),
        surroundings=surroundings,
        metrics=OperatorMetrics(),
        namespaces=namespaces,
        every_s=60.0,
        appeared=lambda: found.appeared.append(True),
    )
    found = Looking(api, KeptObjects(api), resync)
    found.objects.add(document(namespace="ns", uid="u"))
    found.objects.add(owned_object(CONFIG_MAPS, "example-live", data={}))
    return found


@pytest.fixture
async def look() -> AsyncIterator[Looking]:
    async with small_api() as (api, cluster):
        yield looking(api, cluster)


def refused(kind: Kind, answer: Answer, *, watch: bool = False) -> Any:
    def refuse(request: Request) -> Answer | None:
        mine = request.path.endswith(f"/{kind.plural}") and ("watch" in request.query) == watch
        return answer if mine else None

    return refuse


FORBIDDEN: Answer = (403, status_body(403, "Forbidden", 'x is forbidden: User "o" cannot list resource "x"'))


async def test_a_look_finds_services_and_objects_and_has_each_service_worked_on(look: Looking) -> None:
    assert not look.surroundings.synced
    await look.resync.look()
    assert look.surroundings.synced
    assert set(look.resync.services) == {("ns", "example")}
    assert look.known() == {"example-live"}
    assert len(look.resync.queue) == 1
    assert look.surroundings.forbidden() == ()


async def test_objects_that_are_none_of_the_operator_s_are_never_asked_for(look: Looking) -> None:
    await look.resync.look()
    listed = [r for r in look.api.requests if r.method == "GET" and "limit" in r.query]
    assert len(listed) > 10
    for request in listed:
        if request.path.endswith("/flowprefillservices"):
            assert "labelSelector" not in request.query
        else:
            asked = request.query["labelSelector"]
            assert asked == "app.kubernetes.io/managed-by=flowprefill-operator,flowprefill.io/service"


async def test_what_has_vanished_changed_or_come_without_a_word_is_found_and_counted(look: Looking) -> None:
    await look.resync.look()
    assert look.metric("missed_changes_total") == 0
    look.objects.items = {k: v for k, v in look.objects.items.items() if k[2] != "example-live"}
    look.objects.add(owned_object(DEPLOYMENTS, "example-proxy", spec={}))
    look.objects.add(document(namespace="ns", uid="v") | {"metadata": {"name": "two", "namespace": "ns"}})
    await look.resync.look()
    assert look.known() == {"example-proxy"}
    assert set(look.resync.services) == {("ns", "example"), ("ns", "two")}
    assert look.metric("missed_changes_total") == 2


async def test_a_service_that_has_vanished_is_worked_on_a_last_time(look: Looking) -> None:
    await look.resync.look()
    look.objects.items.clear()
    look.resync.queue = WorkQueue()
    await look.resync.look()
    assert list(look.resync.services) == []
    assert len(look.resync.queue) == 1


async def test_a_kind_that_may_not_be_listed_is_told_until_it_may_and_the_rest_is_read(look: Looking) -> None:
    look.objects.refuse = refused(DEPLOYMENTS, FORBIDDEN)
    await look.resync.look()
    assert look.surroundings.synced
    assert look.surroundings.forbidden() == (("list", "deployments.apps"),)
    assert look.known() == {"example-live"}
    look.objects.refuse = lambda request: None
    await look.resync.look()
    assert look.surroundings.forbidden() == ()


async def test_a_kind_that_may_not_be_watched_is_told(look: Looking) -> None:
    look.objects.refuse = refused(CONFIG_MAPS, FORBIDDEN, watch=True)
    await look.resync.look()
    assert look.surroundings.forbidden() == (("watch", "configmaps"),)
    look.objects.refuse = lambda request: None
    await look.resync.look()
    assert look.surroundings.forbidden() == ()


async def test_what_was_known_of_a_kind_stays_known_while_it_may_not_be_listed(look: Looking) -> None:
    await look.resync.look()
    look.objects.refuse = refused(CONFIG_MAPS, FORBIDDEN)
    await look.resync.look()
    assert look.known() == {"example-live"}


async def test_apis_of_other_projects_are_found_when_they_come_and_when_they_go(look: Looking) -> None:
    look.objects.absent = set(OPTIONAL)
    await look.resync.look()
    assert look.surroundings.absent == OPTIONAL
    listed = {r.path.rpartition("/")[2] for r in look.api.requests if "limit" in r.query}
    assert listed.isdisjoint({kind.plural for kind in OPTIONAL})
    assert look.appeared == []
    look.objects.absent = set()
    await look.resync.look()
    assert look.surroundings.absent == set()
    assert len(look.appeared) == len(OPTIONAL)
    look.objects.absent = set(OPTIONAL)
    await look.resync.look()
    assert look.surroundings.absent == OPTIONAL
    assert len(look.appeared) == len(OPTIONAL)


async def test_a_broken_api_of_another_project_keeps_nothing_else_from_being_read(look: Looking) -> None:
    (scaled,) = {kind for kind in OPTIONAL if kind.kind == "ScaledObject"}
    message = "conversion webhook for keda.sh/v1alpha1, Kind=ScaledObject failed"
    look.objects.refuse = refused(scaled, (500, status_body(500, "InternalError", message)))
    await look.resync.look()
    assert look.surroundings.synced
    assert look.known() == {"example-live"}


async def test_a_look_that_fails_is_no_look(look: Looking) -> None:
    """Half of what there is would read as if the rest had to be made anew."""
    look.objects.refuse = refused(DEPLOYMENTS, (500, b"etcdserver: leader changed"))
    with pytest.raises(Unavailable):
        await look.resync.look()
    assert not look.surroundings.synced


@pytest.mark.parametrize(("age_s", "begins"), [(1.0, []), (60.0, [True])])
async def test_a_service_that_no_watch_has_told_of_in_time_makes_watches_begin_anew(
    look: Looking, age_s: float, begins: list[bool]
) -> None:
    await look.resync.look()
    created = (datetime.now(UTC) - timedelta(seconds=age_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
    body = document(namespace="ns", uid="other")
    body["metadata"] |= {"name": "other", "creationTimestamp": created}
    look.objects.add(body)
    await look.resync.look()
    assert look.appeared == begins
    await look.resync.look()
    assert look.appeared == begins, "it is known now"


async def test_a_crd_of_another_release_is_told(look: Looking) -> None:
    await look.resync.look()
    assert not look.surroundings.schema_outdated
    assert look.objects.crd is not None
    look.objects.crd["metadata"]["annotations"] = {}
    await look.resync.look()
    assert look.surroundings.schema_outdated


async def test_a_cluster_without_the_crd_is_told_once_and_when_it_is_there(
    look: Looking, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.name.startswith("flowprefill_operator")]
        caplog.clear()
        return found

    missing = (
        "the CustomResourceDefinition of FlowPrefillServices is not installed; install it with the chart"
    )
    caplog.set_level(logging.INFO, logger="flowprefill_operator.controller.resync")
    assert look.surroundings.unready() == "not synced yet"
    look.objects.absent.add(SERVICES)
    look.objects.crd = None
    await look.resync.look()
    assert (told(), look.surroundings.unready()) == ([missing], missing)
    await look.resync.look()
    assert (told(), look.surroundings.unready()) == ([], missing)
    assert look.appeared == []
    look.objects.absent.clear()
    await look.resync.look()
    assert look.appeared == [True]
    assert (told(), look.surroundings.unready()) == (
        ["the CustomResourceDefinition of FlowPrefillServices is installed"],
        None,
    )


async def test_an_operator_that_may_not_list_services_is_not_ready(look: Looking) -> None:
    look.objects.refuse = refused(SERVICES, FORBIDDEN)
    await look.resync.look()
    assert "may not list flowprefillservices" in str(look.surroundings.unready())
    look.objects.refuse = lambda request: None
    await look.resync.look()
    assert look.surroundings.unready() is None


async def test_a_crd_that_may_not_be_read_is_not_taken_for_an_old_one(look: Looking) -> None:
    look.objects.refuse = lambda request: FORBIDDEN if "customresourcedefinitions" in request.path else None
    await look.resync.look()
    assert look.surroundings.synced
    assert not look.surroundings.schema_outdated


async def test_an_operator_of_some_namespaces_asks_for_those_alone() -> None:
    async with small_api() as (api, cluster):
        look = looking(api, cluster, namespaces=("ns", "other"))
        await look.resync.look()
        listed = {r.path for r in api.requests if "limit" in r.query}
        assert {path.partition("/namespaces/")[2].partition("/")[0] for path in listed} == {"ns", "other"}
        assert set(look.resync.services) == {("ns", "example")}


async def test_services_are_counted_by_what_their_status_says(look: Looking) -> None:
    ready = document(namespace="ns", uid="v")
    ready["metadata"]["name"] = "ready"
    ready["status"] = {"conditions": [{"type": "Ready", "status": "True"}]}
    look.objects.add(ready)
    await look.resync.look()
    assert look.metric("services", ready="True") == 1
    assert look.metric("services", ready="Unknown") == 1
    assert look.metric("services", ready="False") == 0


async def test_why_a_look_is_not_complete_is_a_warning_once(
    look: Looking, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.0)
    look.objects.refuse = lambda request: (503, b"no")
    running = asyncio.create_task(look.resync.run())
    async with asyncio.timeout(30):
        while (look.metric("resyncs_total", result="error") or 0) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    running.cancel()
    told = [record for record in caplog.records if record.getMessage() == "resync not complete"]
    assert [record.levelno for record in told] == [logging.WARNING]
