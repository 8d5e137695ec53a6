"""Requests as they reach an API server, and what is made of its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from flowprefill_operator.cluster import client as module
from flowprefill_operator.cluster.client import Cluster
from flowprefill_operator.cluster.errors import (
    ClusterError,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    Unavailable,
)
from flowprefill_operator.kinds import CONFIG_MAPS, DEPLOYMENTS, OWNED, PODS, SERVICES, kind_of
from support.cluster_objects import owned_object, status_body
from support.small_api import Answer, SmallApi, small_api

CONFIG_MAP = owned_object(CONFIG_MAPS, "a")


@pytest.fixture
async def both() -> AsyncIterator[tuple[SmallApi, Cluster]]:
    async with small_api() as found:
        yield found


Both = tuple[SmallApi, Cluster]


def answers(api: SmallApi, *said: Answer | None) -> None:
    """Answer requests with these, one after the other, and the last again and again."""
    rest = list(said)
    api.answer = lambda request: rest.pop(0) if len(rest) > 1 else rest[0]


def no(status: int, reason: str = "", message: str = "no") -> Answer:
    return status, status_body(status, reason, message)


async def test_requests_carry_the_token(both: Both) -> None:
    api, cluster = both
    await cluster.get(CONFIG_MAPS, "ns", "a")
    assert api.requests[0].authorization == "Bearer secret"


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (CONFIG_MAPS, "/api/v1/namespaces/ns/configmaps/a"),
        (DEPLOYMENTS, "/apis/apps/v1/namespaces/ns/deployments/a"),
        (SERVICES, "/apis/flowprefill.io/v1alpha1/namespaces/ns/flowprefillservices/a"),
    ],
)
async def test_an_object_is_read_at_its_path_and_none_is_none(both: Both, kind: Any, path: str) -> None:
    api, cluster = both
    answers(api, (200, {"kind": kind.kind}), no(404, "NotFound"))
    assert await cluster.get(kind, "ns", "a") == {"kind": kind.kind}
    assert (api.requests[0].method, api.requests[0].path) == ("GET", path)
    assert await cluster.get(kind, "ns", "a") is None


def test_every_owned_kind_is_known_by_how_it_is_written() -> None:
    for kind in OWNED:
        assert kind_of({"apiVersion": kind.api_version, "kind": kind.kind}) is kind
    with pytest.raises(KeyError):
        kind_of({"apiVersion": "v1", "kind": "Secret"})


async def test_a_list_is_read_page_by_page_and_its_items_say_what_they_are(both: Both) -> None:
    api, cluster = both
    token = "eyJ2IjoibWV0YS5rOHMuaW8/djEifQ=="
    answers(
        api,
        (
            200,
            {"metadata": {"continue": token, "resourceVersion": "7"}, "items": [{"metadata": {"name": "a"}}]},
        ),
        (200, {"metadata": {"resourceVersion": "7"}, "items": [{"metadata": {"name": "b"}}]}),
    )
    items, version = await cluster.list(
        PODS, labels="app=x,flowprefill.io/service", fields="status.phase=Failed"
    )
    assert items == [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}} for name in ("a", "b")]
    assert version == "7"
    first, second = api.requests
    assert first.path == second.path == "/api/v1/pods"
    asked = {
        "limit": "500",
        "labelSelector": "app=x,flowprefill.io/service",
        "fieldSelector": "status.phase=Failed",
    }
    assert first.query == asked
    assert second.query == {**asked, "continue": token}


async def test_a_list_of_one_namespace_asks_for_it_alone(both: Both) -> None:
    api, cluster = both
    answers(api, (200, {"metadata": {"resourceVersion": "7"}, "items": []}))
    assert await cluster.list(DEPLOYMENTS, namespace="ns") == ([], "7")
    assert api.requests[0].path == "/apis/apps/v1/namespaces/ns/deployments"


async def test_a_list_whose_pages_are_over_is_no_list(both: Both) -> None:
    """Half a list would read as if the other half were gone."""
    api, cluster = both
    page = {"metadata": {"continue": "next", "resourceVersion": "7"}, "items": [{"metadata": {"name": "a"}}]}
    answers(api, (200, page), no(410, "Expired", "The provided continue parameter is too old"))
    with pytest.raises(Unavailable):
        await cluster.list(PODS)


async def test_an_apply_names_its_manager_and_whether_it_takes_fields_from_others(both: Both) -> None:
    api, cluster = both
    await cluster.apply(CONFIG_MAP, force=True)
    await cluster.apply(CONFIG_MAP, force=False, manager="other")
    await cluster.apply(CONFIG_MAP, force=True, dry_run=True)
    service = owned_object(SERVICES, "s")
    await cluster.apply(service, force=True, part="status")
    first, second, third, fourth = api.requests
    assert (first.method, first.path) == ("PATCH", "/api/v1/namespaces/ns/configmaps/a")
    assert first.content_type == "application/apply-patch+yaml"
    assert first.body == CONFIG_MAP
    assert first.query == {"fieldManager": "flowprefill-operator", "force": "true"}
    assert second.query == {"fieldManager": "other", "force": "false"}
    assert third.query == {"fieldManager": "flowprefill-operator", "force": "true", "dryRun": "All"}
    assert fourth.path == "/apis/flowprefill.io/v1alpha1/namespaces/ns/flowprefillservices/s/status"


async def test_a_spec_is_replaced_only_of_the_object_that_was_looked_at(both: Both) -> None:
    api, cluster = both
    await cluster.replace_spec(DEPLOYMENTS, owned_object(DEPLOYMENTS, "a", version=12), {"replicas": 1})
    (seen,) = api.requests
    assert seen.content_type == "application/json-patch+json"
    assert seen.body == [
        {"op": "test", "path": "/metadata/resourceVersion", "value": "12"},
        {"op": "replace", "path": "/spec", "value": {"replicas": 1}},
    ]


async def test_an_object_is_created_in_its_collection(both: Both) -> None:
    api, cluster = both
    await cluster.create(CONFIG_MAP)
    (seen,) = api.requests
    assert (seen.method, seen.path, seen.body) == ("POST", "/api/v1/namespaces/ns/configmaps", CONFIG_MAP)


async def test_a_delete_is_of_one_uid_and_done_when_that_object_is_gone(both: Both) -> None:
    api, cluster = both
    conflict = no(409, "Conflict", "the UID in the precondition (a) does not match the UID in record (b)")
    answers(api, (200, {}), no(404, "NotFound"), conflict, no(403, "Forbidden", _forbidden("delete")))
    for _ in range(3):
        await cluster.delete(DEPLOYMENTS, "ns", "a", uid="u")
    with pytest.raises(Forbidden):
        await cluster.delete(DEPLOYMENTS, "ns", "a", uid="u")
    seen = api.requests[0]
    assert (seen.method, seen.path) == ("DELETE", "/apis/apps/v1/namespaces/ns/deployments/a")
    assert seen.body == {"propagationPolicy": "Background", "preconditions": {"uid": "u"}}


async def test_an_optional_kind_is_served_when_its_version_lists_it(both: Both) -> None:
    api, cluster = both
    monitors = next(kind for kind in OWNED if kind.kind == "PodMonitor")
    answers(
        api,
        no(404, "NotFound"),
        (200, {"resources": [{"name": "probes"}]}),
        (200, {"resources": [{"name": "podmonitors"}, {"name": "podmonitors/status"}]}),
    )
    assert [await cluster.serves(monitors) for _ in range(3)] == [False, False, True]
    assert api.requests[0].path == "/apis/monitoring.coreos.com/v1"


async def test_the_crd_is_read_and_may_be_absent(both: Both) -> None:
    api, cluster = both
    answers(api, (200, {"metadata": {}}), no(404, "NotFound"))
    assert await cluster.crd() == {"metadata": {}}
    assert await cluster.crd() is None
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/flowprefillservices.flowprefill.io"
    assert api.requests[0].path == path


async def test_a_watch_is_tried_for_a_second_and_its_refusal_told(both: Both) -> None:
    api, cluster = both
    answers(
        api, (200, b'{"type": "BOOKMARK"}\n{"type": "BOOKMARK"}\n'), no(403, "Forbidden", _forbidden("watch"))
    )
    await cluster.try_watch(PODS, namespace=None, labels="a=b", since="7")
    asked = {"watch": "true", "timeoutSeconds": "1", "resourceVersion": "7", "labelSelector": "a=b"}
    assert (api.requests[0].path, api.requests[0].query) == ("/api/v1/pods", asked)
    with pytest.raises(Forbidden) as caught:
        await cluster.try_watch(PODS, namespace="ns", labels=None, since="7")
    assert (caught.value.verb, caught.value.resource) == ("watch", "pods")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (no(403, "Forbidden", 'pods is forbidden: User "x" cannot patch resource "pods"'), Forbidden),
        (no(409, "Conflict"), Conflict),
        (no(422, "Invalid"), Invalid),
        (no(404, "NotFound"), NotFound),
        (no(500, "InternalError"), Unavailable),
        ((502, b"<html>"), Unavailable),
    ],
)
async def test_what_is_refused_is_an_error_with_verb_and_resource(
    both: Both, answer: Answer, error: type[ClusterError]
) -> None:
    api, cluster = both
    answers(api, answer)
    with pytest.raises(error) as caught:
        await cluster.apply(owned_object(DEPLOYMENTS, "a"), force=True)
    assert (caught.value.verb, caught.value.resource) == ("patch", "deployments.apps")
    assert len(api.requests) == 1, "the queue repeats, not the client"


async def test_a_status_that_is_refused_is_named_as_rbac_names_it(both: Both) -> None:
    api, cluster = both
    answers(api, no(403, "Forbidden", _forbidden("patch")))
    with pytest.raises(Forbidden) as caught:
        await cluster.apply(owned_object(SERVICES, "a"), force=True, part="status")
    assert caught.value.resource == "flowprefillservices.flowprefill.io/status"


async def test_a_server_that_does_not_answer_in_time_or_is_not_there_is_unavailable(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, cluster = both
    monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", 0.2)
    answers(api, None)
    with pytest.raises(Unavailable) as caught:
        await cluster.get(PODS, "ns", "a")
    assert (caught.value.status, caught.value.reason) == (0, "Unreachable")


async def test_an_answer_that_is_no_json_is_unavailable(both: Both) -> None:
    """A proxy in between that answers a page of its own."""
    api, cluster = both
    answers(api, (200, b"<html>sign in</html>"))
    with pytest.raises(Unavailable):
        await cluster.get(PODS, "ns", "a")


def _forbidden(verb: str) -> str:
    return f'x is forbidden: User "someone" cannot {verb} resource "x" in API group "" in the namespace "ns"'
