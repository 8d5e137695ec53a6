"""The operator's Deployment and what stands around it, as the values say."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from support.helm import CHART, Helm, by_kind, only
from support.helm_values import CASES, MONITORS, POD, SCHEDULING

SELECTOR = {
    "app.kubernetes.io/name": "flowprefill",
    "app.kubernetes.io/instance": "flowprefill",
    "app.kubernetes.io/component": "operator",
}


def deployment(helm: Helm, values: dict[str, Any] | None = None) -> dict[str, Any]:
    return only(helm.template(values), "Deployment")


def pod(helm: Helm, values: dict[str, Any] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = deployment(helm, values)["spec"]["template"]["spec"]
    return found


def test_the_operator_runs_with_its_configuration_probes_and_names(helm: Helm) -> None:
    objects = helm.template()
    spec = only(objects, "Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert (*container["command"], *container["args"]) == (
        *("flowprefill", "operator"),
        *("--config", "/etc/flowprefill/operator/config.yaml"),
    )
    assert {(item["name"], item["valueFrom"]["fieldRef"]["fieldPath"]) for item in container["env"]} == {
        ("POD_NAME", "metadata.name"),
        ("POD_NAMESPACE", "metadata.namespace"),
    }
    (port,) = container["ports"]
    assert port["containerPort"] == 8080
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": port["name"]}
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    config = volumes[mounted["/etc/flowprefill/operator"]]["configMap"]["name"]
    assert "config.yaml" in only(objects, "ConfigMap", config)["data"]
    assert "emptyDir" in volumes[mounted["/tmp"]]


def test_every_container_of_the_chart_meets_the_restricted_standard(helm: Helm) -> None:
    """Fields that the restricted pod security standard asks for, and a read-only root file system."""
    objects = helm.template()
    specs = [
        only(objects, "Deployment")["spec"]["template"]["spec"],
        only(objects, "Pod")["spec"],
    ]
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"memory"} <= set(container["resources"]["limits"])
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])


def test_only_the_operators_pods_get_a_token(helm: Helm) -> None:
    objects = helm.template()
    assert only(objects, "ServiceAccount")["automountServiceAccountToken"] is False
    assert only(objects, "Deployment")["spec"]["template"]["spec"]["automountServiceAccountToken"] is True
    assert only(objects, "Pod")["spec"]["automountServiceAccountToken"] is False


def test_a_changed_configuration_restarts_the_operator_and_nothing_else_does(helm: Helm) -> None:
    def template(values: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = deployment(helm, values)["spec"]["template"]
        return found

    assert template({}) != template({"logLevel": "debug"})
    assert template({}) == template({"crds": {"create": False}, "networkPolicy": {"enabled": True}})


@pytest.mark.parametrize(
    ("values", "strategy"),
    [
        ({}, {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}),
        ({"leaderElection": {"enabled": False}}, {"type": "Recreate"}),
        ({"strategy": {"type": "Recreate"}}, {"type": "Recreate"}),
    ],
)
def test_the_old_operator_stays_until_the_new_one_is_ready_unless_both_would_work(
    helm: Helm, values: dict[str, Any], strategy: dict[str, Any]
) -> None:
    assert deployment(helm, values)["spec"]["strategy"] == strategy


def test_two_replicas_are_spread_and_have_a_disruption_budget(helm: Helm) -> None:
    objects = helm.template({"replicaCount": 2})
    found = only(objects, "Deployment")
    assert found["spec"]["replicas"] == 2
    (spread,) = found["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"
    assert spread["labelSelector"] == {"matchLabels": SELECTOR}
    budget = only(objects, "PodDisruptionBudget")["spec"]
    assert budget == {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": SELECTOR},
    }


def test_one_replica_has_no_budget_which_would_block_every_eviction(helm: Helm) -> None:
    assert not by_kind(helm.template(), "PodDisruptionBudget")
    assert not by_kind(helm.template(CASES["two-replicas-without-budget"].values), "PodDisruptionBudget")


def test_pods_are_placed_as_the_values_say(helm: Helm) -> None:
    spec = pod(helm, SCHEDULING)
    for name in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
        assert spec[name] == SCHEDULING[name]
    first, second = spec["topologySpreadConstraints"]
    assert first["labelSelector"] == {"matchLabels": SELECTOR}
    assert second["labelSelector"] == {"matchLabels": {"mine": "yes"}}
    assert {k: v for k, v in first.items() if k != "labelSelector"} == SCHEDULING[
        "topologySpreadConstraints"
    ][0]


def test_pods_carry_what_the_values_add(helm: Helm) -> None:
    objects = helm.template(POD)
    found = only(objects, "Deployment")
    template = found["spec"]["template"]
    assert (
        template["metadata"]["labels"].items() >= {"tier": "control", "team": "serving", **SELECTOR}.items()
    )
    assert template["metadata"]["annotations"]["example.com/note"] == "a: b"
    assert found["metadata"]["annotations"] == {"example.com/owner": "somebody"}
    (container,) = template["spec"]["containers"]
    assert container["env"][2:] == POD["extraEnv"]
    assert container["resources"] == POD["resources"]
    assert container["livenessProbe"].items() >= {"periodSeconds": 20, "initialDelaySeconds": 5}.items()
    assert template["spec"]["terminationGracePeriodSeconds"] == 60
    labelled = [item for item in objects if item["kind"] != "CustomResourceDefinition"]
    assert all(item["metadata"]["labels"]["team"] == "serving" for item in labelled)


def test_every_object_has_the_recommended_labels(helm: Helm) -> None:
    for item in helm.template(CASES["everything"].values, apis=MONITORS):
        if item["kind"] == "CustomResourceDefinition":
            continue
        labels = item["metadata"]["labels"]
        for name in ("name", "instance", "component", "part-of", "version", "managed-by"):
            assert labels[f"app.kubernetes.io/{name}"], item["kind"]
        assert labels["helm.sh/chart"] == "flowprefill-0.1.0"


def test_the_selector_of_a_deployment_is_the_same_whatever_the_values(helm: Helm) -> None:
    """It is immutable: a change would make every upgrade fail."""
    for name, case in CASES.items():
        if "nameOverride" not in case.values:
            selector = only(helm.template(case.values, apis=case.apis), "Deployment")["spec"]["selector"]
            assert selector == {"matchLabels": SELECTOR}, name


def test_monitors_exist_where_the_cluster_has_them_and_carry_the_labels(helm: Helm) -> None:
    labels = {"monitoring": {"labels": {"release": "prometheus"}}}
    assert not by_kind(helm.template(labels), "PodMonitor")
    monitor = only(helm.template(labels, apis=MONITORS), "PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"] == {"matchLabels": SELECTOR}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint == {"port": "http", "path": "/metrics", "interval": "30s"}
    assert not by_kind(
        helm.template({"monitoring": {"podMonitor": {"enabled": False}}}, apis=MONITORS), "PodMonitor"
    )


def test_a_service_monitor_finds_the_operators_service(helm: Helm) -> None:
    objects = helm.template(CASES["service-monitor"].values, apis=MONITORS)
    assert not by_kind(objects, "PodMonitor")
    monitor, service = only(objects, "ServiceMonitor"), only(objects, "Service")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert service["spec"]["selector"] == SELECTOR
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]


def test_the_operators_own_policy_admits_prometheus_and_the_charts_test(helm: Helm) -> None:
    assert not by_kind(helm.template(), "NetworkPolicy")
    objects = helm.template({"networkPolicy": {"enabled": True}})
    spec = only(objects, "NetworkPolicy")["spec"]
    assert spec["podSelector"] == {"matchLabels": SELECTOR}
    assert spec["policyTypes"] == ["Ingress"]
    ((tester, prometheus),) = [rule["from"] for rule in spec["ingress"]]
    test_labels = only(objects, "Pod")["metadata"]["labels"]
    assert tester["podSelector"]["matchLabels"].items() <= test_labels.items()
    assert prometheus == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


def test_the_charts_test_asks_the_operators_service_with_the_operators_image(helm: Helm) -> None:
    objects = helm.template({"image": {"registry": "registry.example.com"}}, name="fp", namespace="here")
    tester = only(objects, "Pod")
    assert tester["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = tester["spec"]["containers"]
    (operator,) = only(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == operator["image"]
    service = only(objects, "Service")
    port = service["spec"]["ports"][0]["port"]
    url = f"http://{service['metadata']['name']}.here.svc:{port}/readyz"
    (code,) = container["args"]
    assert f'"{url}"' in code
    compile(code, "test", "exec")


def test_the_notes_name_what_to_do_next(helm: Helm) -> None:
    def notes(values: dict[str, Any]) -> str:
        said = helm(
            *("install", "flowprefill", str(CHART), "--dry-run=client", "--namespace", "system"),
            values=values,
        ).stdout
        return said.partition("NOTES:")[2]

    text = notes({})
    assert "No public image exists yet" in text
    assert "make images" in text
    assert "apply -f crds/samples/quickstart.yaml" in text
    assert "deployment/flowprefill-operator" in text
    assert "every namespace" in text
    assert "No public image" not in notes({"image": {"registry": "registry.example.com"}})
    assert "serves namespaces team-a, team-b" in notes({"namespaces": ["team-a", "team-b"]})
    for served in ([], ["team-a", "team-b"]):
        said = " ".join(notes({"namespaces": served}).split())
        assert "in a namespace that no operator serves" in said
        assert ("this one serves team-a, team-b" in said) == bool(served)
        assert "get configmap" in said
    assert "deletes the CRD" in notes({"crds": {"keep": False}})
    assert "rights yourself" in notes({"rbac": {"create": False}})


def test_every_document_is_one_object_with_a_namespace_where_it_has_one(helm: Helm) -> None:
    cluster_scoped = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}
    for name, case in CASES.items():
        for item in helm.template(case.values, apis=case.apis):
            assert item["apiVersion"], name
            assert ("namespace" in item["metadata"]) == (item["kind"] not in cluster_scoped), item["kind"]
            assert yaml.safe_dump(item)
