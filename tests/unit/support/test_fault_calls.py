"""Requests are read as RBAC reads them, and the k-th write is found whatever comes between."""

from __future__ import annotations

from typing import Literal

import pytest

from support.control_plane.fault_calls import Call, Calls, Refusal, call_of
from support.control_plane.operator_identity import chart_rules, without

CASES = [
    ("GET", "/api/v1/pods", {}, "list", "pods", None, None),
    ("GET", "/api/v1/pods", {"watch": "true"}, "watch", "pods", None, None),
    ("GET", "/api/v1/namespaces/a/pods/p", {}, "get", "pods", "a", "p"),
    ("GET", "/api/v1/namespaces/a", {}, "get", "namespaces", None, "a"),
    ("POST", "/apis/apps/v1/namespaces/a/deployments", {}, "create", "deployments.apps", "a", None),
    ("PATCH", "/apis/apps/v1/namespaces/a/deployments/d", {}, "patch", "deployments.apps", "a", "d"),
    ("PATCH", "/apis/g.io/v1/namespaces/a/things/t/status", {}, "patch", "things.g.io/status", "a", "t"),
    (
        "PUT",
        "/apis/coordination.k8s.io/v1/namespaces/a/leases/l",
        {},
        "update",
        "leases.coordination.k8s.io",
        "a",
        "l",
    ),
    ("DELETE", "/api/v1/namespaces/a/configmaps/c", {}, "delete", "configmaps", "a", "c"),
    ("DELETE", "/api/v1/namespaces/a/configmaps", {}, "deletecollection", "configmaps", "a", None),
    ("GET", "/readyz", {}, "list", "/readyz", None, None),
]


@pytest.mark.parametrize(("method", "path", "query", "verb", "resource", "namespace", "name"), CASES)
def test_a_request_is_read_as_rbac_reads_it(
    method: str, path: str, query: dict[str, str], verb: str, resource: str, namespace: str, name: str
) -> None:
    call = call_of(method, path, query, "agent")
    assert (call.verb, call.resource, call.namespace, call.name) == (verb, resource, namespace, name)


def call(method: str = "PATCH", resource: str = "configmaps", *, dry: bool = False) -> Call:
    return Call(
        method=method,
        verb="patch",
        resource=resource,
        namespace="a",
        name="c",
        user_agent="agent",
        dry_run=dry,
    )


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_kth_write_is_counted_from_now_and_found_once(when: Literal["before", "after"]) -> None:
    calls = Calls()
    calls.arrived(call())
    calls.at_write(2, lambda: None, when)
    others = (
        call("GET"),
        call(dry=True),
        call(resource="leases.coordination.k8s.io"),
        call(resource="events"),
    )
    assert [calls.arrived(each)[1] for each in others] == [None] * 4
    assert calls.arrived(call())[1] is None
    found = calls.arrived(call())[1]
    assert found is not None
    assert found.when == when
    assert calls.arrived(call())[1] is None
    assert len(calls.writes()) == 4


def test_a_refusal_matches_what_it_names_and_everything_else_alike() -> None:
    assert Refusal(status=500).matches(call())
    assert Refusal(status=403, verb="patch", resource="configmaps").matches(call())
    assert not Refusal(status=403, verb="patch", resource="secrets").matches(call())
    assert not Refusal(status=403, verb="get", resource="configmaps").matches(call())
    assert not Refusal(status=403, name="other").matches(call())


def test_one_verb_on_one_resource_is_taken_out_of_rules_and_nothing_else() -> None:
    def rights(rules: list[dict[str, list[str]]]) -> set[tuple[str, str]]:
        return {
            (verb, resource) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]
        }

    whole = rights(chart_rules())
    assert ("patch", "services") in whole
    assert rights(without(chart_rules(), "patch", "services")) == whole - {("patch", "services")}
