"""The chart's life on real API servers, by the real helm. No node is needed: pods are admitted, not run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowprefill_crd.crd import CRD_NAME
from support.control_plane.assets import RELEASES, assets
from support.control_plane.plane import ControlPlane
from support.helm import CHART, helm_program
from support.helm_cluster import OPERATOR, RELEASE, WAIT_S, ChartCluster, chart_cluster
from support.releases import last_release


@pytest.fixture(scope="module", params=RELEASES)
def plane(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane of its own: these tests install and remove the CRD, which others need to stay."""
    helm_program()
    running = ControlPlane(assets(request.param), tmp_path_factory.mktemp("chart") / request.param)
    running.start()
    yield running
    running.stop()


@pytest.fixture
def cluster(plane: ControlPlane, tmp_path: Path) -> Iterator[ChartCluster]:
    with chart_cluster(plane, tmp_path) as found:
        yield found


def test_an_install_gives_the_crd_and_an_operator_whose_pod_is_admitted_under_restricted_pod_security(
    cluster: ChartCluster,
) -> None:
    restricted = "pod-security.kubernetes.io/enforce=restricted"
    cluster.kubectl("label", "namespace", cluster.namespace, restricted)
    cluster.install()
    cluster.apply_sample()
    cluster.until(
        lambda found: found.get("status", {}).get("unavailableReplicas") == 1, "deployment", OPERATOR
    )
    (pod,) = cluster.get("pods")["items"]
    assert pod["spec"]["serviceAccountName"] == OPERATOR
    cluster.kubectl("-n", cluster.namespace, "create", "-f", "-", stdin=json.dumps(cluster.test_pod()))


def test_an_upgrade_changes_what_its_values_change_and_a_rollback_changes_it_back(
    cluster: ChartCluster,
) -> None:
    cluster.install()
    service = cluster.apply_sample()
    crd = cluster.uid("crd", CRD_NAME)
    before = cluster.get("deployment", OPERATOR)

    cluster.upgrade()
    same = cluster.get("deployment", OPERATOR)
    assert same["metadata"]["generation"] == before["metadata"]["generation"]

    cluster.upgrade({"logLevel": "debug", "replicaCount": 2})
    assert cluster.config()["logLevel"] == "debug"
    changed = cluster.get("deployment", OPERATOR)
    assert changed["spec"]["replicas"] == 2
    assert changed["spec"]["template"] != before["spec"]["template"]
    cluster.get("pdb", OPERATOR)

    cluster.helm("rollback", RELEASE, "1", "--namespace", cluster.namespace)
    assert cluster.config()["logLevel"] == "info"
    assert cluster.get("deployment", OPERATOR)["spec"] == before["spec"]
    budgets = cluster.kubectl("-n", cluster.namespace, "get", "pdb", "-o", "name")
    assert budgets.stdout == ""
    assert (cluster.uid("crd", CRD_NAME), cluster.uid("fps", "quickstart")) == (crd, service)


def test_an_uninstall_leaves_crd_and_services_and_the_next_install_takes_over(cluster: ChartCluster) -> None:
    cluster.install()
    kept = (cluster.apply_sample(), cluster.uid("crd", CRD_NAME))

    def uids() -> tuple[str, str]:
        return cluster.uid("fps", "quickstart"), cluster.uid("crd", CRD_NAME)

    assert CRD_NAME in cluster.uninstall()
    mine = ("-o", "name", "-l", f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/name=flowprefill")
    kinds = "all,configmap,serviceaccount,role,rolebinding"
    assert cluster.kubectl("-n", cluster.namespace, "get", kinds, *mine).stdout == ""
    assert cluster.kubectl("get", "clusterrole,clusterrolebinding", *mine).stdout == ""
    assert uids() == kept

    cluster.helm("install", RELEASE, str(CHART), "--namespace", cluster.namespace)
    assert uids() == kept

    cluster.uninstall()
    other = ("install", "other", str(CHART), "--namespace", cluster.namespace)
    refused = cluster.helm(*other, check=False)
    assert refused.returncode != 0
    assert "invalid ownership metadata" in refused.stderr
    cluster.helm(*other, "--take-ownership")
    assert uids() == kept


def test_a_service_goes_on_while_the_chart_leaves_its_crd_to_others(cluster: ChartCluster) -> None:
    """`crds.create=false` neither needs nor touches the CRD, and no longer creating it does not delete it."""
    cluster.install()
    kept = cluster.apply_sample()
    cluster.upgrade({"crds": {"create": False}})
    assert cluster.uid("fps", "quickstart") == kept
    cluster.upgrade({"crds": {"create": True}})
    assert cluster.uid("fps", "quickstart") == kept


def test_two_releases_serve_different_namespaces_but_never_the_same(cluster: ChartCluster) -> None:
    first, second, elsewhere = (
        cluster.create_namespace(name) for name in ("first", "second", "other-system")
    )
    shared = {"crds": {"create": False}, "rbac": {"aggregate": False}}
    other = ("install", RELEASE, str(CHART), "--namespace", elsewhere)
    cluster.install({"namespaces": [first]})

    refused = cluster.helm(*other, values={"namespaces": [second, first], **shared}, check=False)
    owner = f'release "{RELEASE}" in namespace "{cluster.namespace}"'
    assert f"{owner} already serves namespace {first}" in refused.stderr
    refused = cluster.helm(*other, values=shared, check=False)
    assert f"{owner} already serves namespace {first}" in refused.stderr

    cluster.helm(*other, values={"namespaces": [second], **shared})
    cluster.helm("uninstall", RELEASE, "--namespace", elsewhere)
    cluster.upgrade()
    for values in ({"namespaces": [second]}, {}):
        refused = cluster.helm(
            *("install", "second", str(CHART), "--namespace", elsewhere),
            values={**values, **shared},
            check=False,
        )
        assert f"{owner} already serves every namespace" in refused.stderr


def test_the_chart_of_the_last_release_is_upgraded_in_place_and_rolled_back(
    cluster: ChartCluster, tmp_path: Path
) -> None:
    package = str(last_release(tmp_path).chart(cluster.helm))
    cluster.helm("install", RELEASE, package, "--namespace", cluster.namespace, "--take-ownership")
    kept = cluster.apply_sample(), cluster.uid("crd", CRD_NAME), cluster.uid("deployment", OPERATOR)

    def uids() -> tuple[str, str, str]:
        return (
            cluster.uid("fps", "quickstart"),
            cluster.uid("crd", CRD_NAME),
            cluster.uid("deployment", OPERATOR),
        )

    cluster.upgrade(of_values="--reset-then-reuse-values")
    assert uids() == kept
    assert cluster.get("fps", "quickstart")["metadata"]["generation"] == 1
    cluster.helm("rollback", RELEASE, "--namespace", cluster.namespace)
    assert uids() == kept


def test_a_crd_that_is_not_kept_goes_with_the_chart_and_its_services_with_it(cluster: ChartCluster) -> None:
    cluster.install({"crds": {"keep": False}})
    cluster.apply_sample()
    assert CRD_NAME not in cluster.uninstall()
    cluster.kubectl("wait", "--for=delete", f"crd/{CRD_NAME}", f"--timeout={WAIT_S:.0f}s")
    assert cluster.kubectl("get", "fps", "-A", check=False).returncode != 0
