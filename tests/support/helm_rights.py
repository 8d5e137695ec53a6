"""What the operator does in a cluster, written down by hand: the chart's roles allow this and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

from support.rbac import Triple

READ = ("get", "list", "watch")
KEEP = (*READ, "create", "patch")
OWN = (*KEEP, "delete")
SERVED: dict[tuple[str, str], tuple[str, ...]] = {
    ("flowprefill.io", "flowprefillservices"): ("list", "watch"),
    ("flowprefill.io", "flowprefillservices/status"): ("patch",),
    ("flowprefill.io", "flowprefillservices/finalizers"): ("update",),
    ("", "configmaps"): OWN,
    ("", "persistentvolumeclaims"): OWN,
    ("", "serviceaccounts"): KEEP,
    ("", "services"): OWN,
    ("apps", "controllerrevisions"): OWN,
    ("apps", "deployments"): OWN,
    ("batch", "jobs"): OWN,
    ("networking.k8s.io", "networkpolicies"): OWN,
    ("policy", "poddisruptionbudgets"): OWN,
    ("autoscaling", "horizontalpodautoscalers"): OWN,
    ("rbac.authorization.k8s.io", "roles"): KEEP,
    ("rbac.authorization.k8s.io", "rolebindings"): KEEP,
    ("keda.sh", "scaledobjects"): OWN,
    ("monitoring.coreos.com", "podmonitors"): OWN,
    ("gateway.networking.k8s.io", "httproutes"): OWN,
    ("", "pods"): ("list", "watch"),
    ("events.k8s.io", "events"): ("list", "create"),
    ("discovery.k8s.io", "endpointslices"): READ,
}
"""What the operator does with the objects of the namespaces that it serves."""
CLUSTER: dict[tuple[str, str], tuple[str, ...]] = {
    ("apiextensions.k8s.io", "customresourcedefinitions"): READ
}
LEASE: dict[tuple[str, str], tuple[str, ...]] = {
    ("coordination.k8s.io", "leases"): ("get", "create", "update")
}


def triples(table: Mapping[tuple[str, str], tuple[str, ...]]) -> frozenset[Triple]:
    return frozenset(Triple(group, name, verb) for (group, name), verbs in table.items() for verb in verbs)
