"""Who may do what: the roles that the chart renders."""

from __future__ import annotations

from typing import Any

from flowprefill_operator.kinds import OWNED
from support.helm import Helm, by_kind, only
from support.helm_rights import SERVED, triples
from support.rbac import Triple, allowed

CRDS = {"apiGroups": ["apiextensions.k8s.io"], "resources": ["customresourcedefinitions"]}


def served_rules(helm: Helm) -> list[dict[str, Any]]:
    """The rules on objects of served namespaces."""
    role = only(helm.template({"namespaces": ["team-a"]}), "Role", "flowprefill-operator")
    assert role["metadata"]["namespace"] == "team-a"
    return list(role["rules"])


def test_the_operator_may_do_what_it_does_and_nothing_else(helm: Helm) -> None:
    assert allowed(served_rules(helm)) == triples(SERVED)


def test_the_operator_writes_exactly_the_kinds_that_it_owns(helm: Helm) -> None:
    """A kind that the code learns to own is missing here until the chart grants it, and the other way round."""
    rules = allowed(served_rules(helm))
    owned = {(kind.group, kind.plural) for kind in OWNED}
    for verb in ("get", "list", "watch", "create", "patch"):
        assert owned <= {(triple.group, triple.resource) for triple in rules if triple.verb == verb}
    assert {(triple.group, triple.resource) for triple in rules if triple.verb == "delete"} <= owned


def test_without_listed_namespaces_the_same_rules_hold_in_the_whole_cluster(helm: Helm) -> None:
    objects = helm.template()
    role = only(objects, "ClusterRole", "flowprefill-operator")
    crds, rest = role["rules"][:2], role["rules"][2:]
    assert rest == served_rules(helm)
    assert crds == [
        {**CRDS, "resourceNames": ["flowprefillservices.flowprefill.io"], "verbs": ["get"]},
        {**CRDS, "verbs": ["list", "watch"]},
    ]
    assert [item["metadata"]["name"] for item in by_kind(objects, "Role")] == ["flowprefill-operator-lease"]


def test_with_listed_namespaces_only_crds_are_seen_beyond_them(helm: Helm) -> None:
    objects = helm.template({"namespaces": ["team-a", "team-b"]}, namespace="here")
    (cluster_role,) = [
        role
        for role in by_kind(objects, "ClusterRole")
        if role["metadata"]["labels"]["app.kubernetes.io/component"] == "operator"
    ]
    assert {(t.resource, t.verb) for t in allowed(cluster_role["rules"])} == {
        ("customresourcedefinitions", verb) for verb in ("get", "list", "watch")
    }
    places = {(role["metadata"]["namespace"], role["metadata"]["name"]) for role in by_kind(objects, "Role")}
    assert places == {
        ("team-a", "flowprefill-operator"),
        ("team-b", "flowprefill-operator"),
        ("here", "flowprefill-operator-lease"),
    }
    twin = helm.template({"namespaces": ["team-c"]}, namespace="there")
    assert not {item["metadata"]["name"] for item in by_kind(objects, "ClusterRoleBinding")} & {
        item["metadata"]["name"] for item in by_kind(twin, "ClusterRoleBinding")
    }


def test_every_binding_gives_an_existing_role_to_the_operators_account_alone(helm: Helm) -> None:
    for values, account in (
        ({}, "flowprefill-operator"),
        ({"namespaces": ["team-a"]}, "flowprefill-operator"),
        ({"serviceAccount": {"create": False, "name": "mine"}}, "mine"),
    ):
        objects = helm.template(values, namespace="here")
        assert only(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == account
        roles = {
            (item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"])
            for kind in ("Role", "ClusterRole")
            for item in by_kind(objects, kind)
        }
        bindings = by_kind(objects, "RoleBinding") + by_kind(objects, "ClusterRoleBinding")
        assert bindings
        for binding in bindings:
            reference = binding["roleRef"]
            place = binding["metadata"].get("namespace") if reference["kind"] == "Role" else None
            assert (reference["kind"], place, reference["name"]) in roles
            assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "here"}]


def test_the_lease_that_may_be_updated_is_the_configured_one(helm: Helm) -> None:
    objects = helm.template(name="fp")
    role = only(objects, "Role", "fp-flowprefill-operator-lease")
    group = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    assert role["rules"] == [
        {**group, "resourceNames": ["fp-flowprefill-operator"], "verbs": ["get", "update"]},
        {**group, "verbs": ["create"]},
    ]
    assert "leaseName: fp-flowprefill-operator\n" in only(objects, "ConfigMap")["data"]["config.yaml"]
    assert not by_kind(helm.template({"leaderElection": {"enabled": False}}), "Role")


def test_view_reads_edit_writes_and_nobody_but_the_operator_writes_the_status(helm: Helm) -> None:
    objects = helm.template()
    services, status = "flowprefillservices", "flowprefillservices/status"

    def of(role: str) -> set[Triple]:
        found = only(objects, "ClusterRole", f"flowprefill-{role}")
        assert found["metadata"]["labels"][f"rbac.authorization.k8s.io/aggregate-to-{role}"] == "true"
        return set(allowed(found["rules"]))

    group = "flowprefill.io"
    view = {Triple(group, services, verb) for verb in ("get", "list", "watch")}
    view.add(Triple(group, status, "get"))
    write = {
        Triple(group, services, verb) for verb in ("create", "update", "patch", "delete", "deletecollection")
    }
    assert of("view") == view
    assert of("edit") == view | write
    assert of("admin") == view | write | {Triple(group, "flowprefillservices/finalizers", "update")}


def test_rights_are_left_out_when_the_values_say_so(helm: Helm) -> None:
    def kinds(values: dict[str, Any]) -> set[str]:
        wanted = ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
        return {kind for kind in wanted if by_kind(helm.template(values), kind)}

    assert kinds({"rbac": {"create": False, "aggregate": False}, "namespaces": ["a"]}) == set()
    assert kinds({"rbac": {"create": False}}) == {"ClusterRole"}
    assert not by_kind(helm.template({"serviceAccount": {"create": False, "name": "x"}}), "ServiceAccount")
