"""Who may do what once the chart is installed, as a real API server says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowprefill_crd.crd import CRD_NAME
from flowprefill_crd.samples import sample_path
from support.control_plane.assets import assets
from support.control_plane.plane import ControlPlane
from support.helm import helm_program
from support.helm_cluster import OPERATOR, ChartCluster, chart_cluster
from support.helm_rights import CLUSTER, LEASE, READ, SERVED, triples


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane of its own: these tests install the chart for the whole cluster."""
    helm_program()
    running = ControlPlane(assets("newest"), tmp_path_factory.mktemp("rights") / "newest")
    running.start()
    yield running
    running.stop()


@pytest.fixture
def cluster(plane: ControlPlane, tmp_path: Path) -> Iterator[ChartCluster]:
    with chart_cluster(plane, tmp_path) as found:
        yield found


def test_the_operators_account_may_do_what_the_operator_does_and_nothing_else(cluster: ChartCluster) -> None:
    cluster.install()
    account, namespace = cluster.account, cluster.namespace
    assert cluster.rights(account, namespace) == triples(SERVED | CLUSTER | LEASE)
    assert cluster.rights(account, "default") == triples(SERVED | CLUSTER)
    assert cluster.may(account, "list", "deployments.apps", "--all-namespaces")
    crds = "customresourcedefinitions.apiextensions.k8s.io"
    assert cluster.may(account, "get", f"{crds}/{CRD_NAME}")
    assert not cluster.may(account, "get", f"{crds}/others.example.com")
    assert cluster.may(account, "-n", namespace, "update", f"leases.coordination.k8s.io/{OPERATOR}")
    assert not cluster.may(account, "-n", namespace, "update", "leases.coordination.k8s.io/other")
    for verb in READ:
        assert not cluster.may(account, verb, "secrets", "--all-namespaces")
        assert not cluster.may(account, "-n", namespace, verb, "secrets")


def test_an_operator_of_listed_namespaces_may_do_nothing_in_another(cluster: ChartCluster) -> None:
    first, second, elsewhere = (cluster.create_namespace(name) for name in ("first", "second", "elsewhere"))
    cluster.install({"namespaces": [first, second]})
    assert cluster.config()["namespaces"] == [first, second]
    for name in (first, second):
        assert cluster.rights(cluster.account, name) == triples(SERVED | CLUSTER)
    assert cluster.rights(cluster.account, elsewhere) == triples(CLUSTER)
    assert cluster.rights(cluster.account, cluster.namespace) == triples(CLUSTER | LEASE)
    cluster.upgrade({"namespaces": [second, elsewhere]})
    assert cluster.rights(cluster.account, first) == triples(CLUSTER)
    assert cluster.rights(cluster.account, elsewhere) == triples(SERVED | CLUSTER)


def test_the_operator_can_grant_a_proxys_role_and_no_more(cluster: ChartCluster) -> None:
    """RBAC refuses to grant what the granter does not hold."""
    cluster.install()

    def role(resource: str, group: str) -> str:
        rule = {"apiGroups": [group], "resources": [resource], "verbs": ["get", "list", "watch"]}
        return json.dumps(
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "Role",
                "metadata": {"name": f"read-{resource}", "namespace": cluster.namespace},
                "rules": [rule],
            }
        )

    apply = (f"--as={cluster.account}", "apply", "--server-side", "-f", "-")
    cluster.kubectl(*apply, stdin=role("endpointslices", "discovery.k8s.io"))
    refused = cluster.kubectl(*apply, stdin=role("secrets", ""), check=False)
    assert "attempting to grant RBAC permissions not currently held" in refused.stderr


def test_users_with_the_clusters_edit_role_write_services_and_users_with_view_read_them(
    cluster: ChartCluster,
) -> None:
    cluster.install()
    cluster.established()
    here = ("-n", cluster.namespace)
    for user, role in (("vera", "view"), ("edith", "edit"), ("ada", "admin")):
        cluster.kubectl(*here, "create", "rolebinding", user, f"--clusterrole={role}", f"--user={user}")
    # The cluster's roles take the chart's in a moment later.
    cluster.plane.until_done("--as=edith", *here, "apply", "-f", str(sample_path("quickstart.yaml")))
    cluster.plane.until_done("--as=vera", *here, "get", "fps", "quickstart")
    refused = cluster.kubectl("--as=vera", *here, "delete", "fps", "quickstart", check=False)
    assert "forbidden" in refused.stderr.lower()
    services = "flowprefillservices.flowprefill.io"
    assert not cluster.may("vera", *here, "create", services)
    assert not cluster.may("edith", "-n", "default", "create", services)
    for user in ("edith", "ada"):
        assert not cluster.may(user, *here, "patch", services, "--subresource=status")
    cluster.plane.until_done("--as=ada", *here, "delete", "fps", "quickstart")


def test_without_aggregation_the_clusters_roles_stay_as_they_are(cluster: ChartCluster) -> None:
    labels = "-l", "rbac.authorization.k8s.io/aggregate-to-edit=true,app.kubernetes.io/part-of=flowprefill"
    cluster.install()
    assert cluster.kubectl("get", "clusterrole", *labels, "-o", "name").stdout
    cluster.upgrade({"rbac": {"aggregate": False}})
    assert cluster.kubectl("get", "clusterrole", *labels, "-o", "name").stdout == ""
