"""The chart's rights are exactly what the operator uses: every way of a reconcile, read back from the audit log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from flowprefill_operator.kinds import OWNED
from support.control_plane.hollow_behaviour import Completes, MountFails
from support.control_plane.operated import Operated, operated, simulated
from support.control_plane.operator_identity import (
    ACCOUNT,
    CLUSTER_RULES,
    LEASE_RULES,
    SYSTEM_NAMESPACE,
    chart_rules,
)
from support.control_plane.plane import ControlPlane
from support.control_plane.waiting import until
from support.ecosystem import ecosystem_crds
from support.rbac import Triple, compare, used

Json = dict[str, Any]

FOREIGN = (
    "podmonitors.monitoring.coreos.com",
    "scaledobjects.keda.sh",
    "httproutes.gateway.networking.k8s.io",
)
GRANTED = (
    # Asked for by OwnerReferencesPermissionEnforcement, without a request of its own.
    Triple("flowprefill.io", "flowprefillservices/finalizers", "update"),
    # The proxies' own right: who grants it has to hold it.
    *(Triple("discovery.k8s.io", "endpointslices", verb) for verb in ("get", "list", "watch")),
)
KEDA = {"minReplicas": 1, "maxReplicas": 3, "provider": "Keda", "prometheusAddress": "http://prometheus:9090"}
ROUTE = {"parentRefs": [{"name": "gateway"}]}
CLAIM = {"persistentVolumeClaim": {"storage": "1Gi", "retain": False}}
NAME = "web"


@pytest.fixture(scope="module")
def everything(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    """An operator that elects itself, in a cluster that has every API it knows."""
    for path in ecosystem_crds():
        plane.kubectl("apply", "--server-side", "-f", str(path))
    for name in FOREIGN:
        plane.until_done("wait", "--for=condition=Established", "--timeout=60s", f"crd/{name}")
    election = {"enabled": True, "leaseSeconds": 15}
    with operated(
        plane, tmp_path_factory.mktemp("rights"), leaderElection=election, resyncSeconds=5
    ) as found:
        yield found


def full_spec() -> Json:
    """A service that owns an object of every kind."""
    body = simulated(
        NAME,
        model={"uri": "hf://example/model", "cache": CLAIM},
        prefill={"autoscaling": {"minReplicas": 1, "maxReplicas": 2}},
        decode={"replicas": 2},
        proxy={"autoscaling": KEDA, "httpRoute": ROUTE},
        scheduling={"predictor": {"profilingJob": True}},
    )
    return body


def go_through_everything(cluster: Operated, namespace: str) -> None:
    profile = json.dumps({"samples": []})
    cluster.node.behave(Completes(message=profile), namespace=namespace, role="profiler")
    cluster.apply(namespace, full_spec())
    cluster.wait_ready(namespace, NAME)
    uid = cluster.service(namespace, NAME)["metadata"]["uid"]

    # What is no longer asked for goes, kind by kind; the Job went when its profile was there.
    bare = {
        "model": {"uri": "embedded://tiny", "cache": None},
        "prefill": {"autoscaling": None},
        "decode": {"replicas": 1},
        "proxy": {"autoscaling": None, "httpRoute": None},
        "observability": {"podMonitor": False},
    }
    cluster.change(namespace, NAME, bare)
    gone = {
        "HorizontalPodAutoscaler",
        "ScaledObject",
        "HTTPRoute",
        "PodMonitor",
        "PersistentVolumeClaim",
        "Job",
    }
    until(
        lambda: not gone & {kind for kind, _ in cluster.owned(namespace, uid)},
        "what is no longer asked for is gone",
    )
    # More revisions than records are kept for.
    for number in range(2, 8):
        cluster.change(namespace, NAME, {"decode": {"maxBatchSize": number}})
        cluster.wait_ready(namespace, NAME)
    # Why a pod cannot start is asked for where only Events tell.
    cluster.node.behave(MountFails(), namespace=namespace, service=NAME, role="decode")
    cluster.change(namespace, NAME, {"decode": {"maxBatchSize": 9}})
    cluster.wait_condition(namespace, NAME, "DecodeReady", "False", reason="SecretMissing")


def test_the_operator_uses_every_right_that_the_chart_grants_and_needs_no_other(
    everything: Operated, namespace: str
) -> None:
    go_through_everything(everything, namespace)
    rules = [*chart_rules(), *CLUSTER_RULES, *LEASE_RULES]
    user = f"system:serviceaccount:{SYSTEM_NAMESPACE}:{ACCOUNT}"
    difference = compare(used(everything.plane.audit_log, user), rules, granted=GRANTED)
    assert not difference.missing, str(difference)
    assert not difference.unused, str(difference)


def test_every_kind_of_object_came_to_be(everything: Operated) -> None:
    """Or the test above would not say much."""
    log = everything.plane.audit_log.read_text()
    for kind in OWNED:
        assert f'"resource":"{kind.plural}"' in log, kind.kind
