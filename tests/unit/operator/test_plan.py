"""Claims about the objects of a service, as a cluster would see them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowprefill_crd import LiveConfig, PodConfig, load_services, parse_service, restart_hash
from flowprefill_operator.plan import plan
from flowprefill_operator.resources.base import Context
from flowprefill_operator.resources.model_commit import model_commit
from flowprefill_operator.resources.service import url
from flowprefill_operator.settings import LocalPlaces, PlanSettings
from support.services import MINIMAL_SPEC, changes, document, merged

SAMPLES = sorted((Path(__file__).parents[3] / "crds" / "samples").glob("*.yaml"))
HF = {"model": {"uri": "hf://org/name", "secretRef": {"name": "hub", "key": "token"}}}


def planned(changed: dict[str, Any] | None = None, **metadata: Any) -> list[dict[str, Any]]:
    """The objects of the smallest service with `changed` merged into its spec."""
    body = document(**metadata)
    body["spec"] = merged(body["spec"], changed or {})
    return [dict(item) for item in plan(parse_service(body), PlanSettings())]


def commit_map(changed: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    """The ConfigMap with the commit of such a service's model."""
    service = parse_service(document(merged(MINIMAL_SPEC, changed), **metadata))
    return dict(model_commit(Context(service, PlanSettings()), "0" * 40))


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in objects if item["kind"] == kind]


def deployments(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Deployments by role."""
    return {
        item["spec"]["template"]["metadata"]["labels"]["flowprefill.io/role"]: item
        for item in of_kind(objects, "Deployment")
    }


def pod(objects: list[dict[str, Any]], role: str) -> dict[str, Any]:
    return deployments(objects)[role]["spec"]["template"]["spec"]


def templates(objects: list[dict[str, Any]]) -> str:
    return json.dumps({role: item["spec"]["template"] for role, item in deployments(objects).items()})


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_every_sample_is_planned_the_same_each_time_and_is_json(sample: Path) -> None:
    for service in load_services(sample):
        first, second = plan(service, PlanSettings()), plan(service, PlanSettings())
        assert json.dumps(first) == json.dumps(second)


def test_a_service_is_a_proxy_and_a_pair_of_workers() -> None:
    objects = planned()
    assert set(deployments(objects)) == {"prefill", "decode", "proxy"}


def test_colocated_pods_take_the_place_of_both_workers_and_move_no_kv() -> None:
    objects = planned({"mode": "Colocated"})
    assert set(deployments(objects)) == {"colocated", "proxy"}
    (container,) = pod(objects, "colocated")["containers"]
    assert "--kv-port" not in container["args"]
    assert container["args"][:2] == ["--role", "colocated"]


def test_workers_and_their_services_carry_the_revision_and_the_proxy_is_stable() -> None:
    revision = restart_hash(parse_service(document()))
    objects = planned()
    names = {item["metadata"]["name"] for item in of_kind(objects, "Service")}
    assert names == {f"example-prefill-{revision}", f"example-decode-{revision}", "example-proxy"}
    workers = deployments(objects)
    assert workers["prefill"]["metadata"]["name"] == f"example-prefill-{revision}"
    assert workers["proxy"]["metadata"]["name"] == "example-proxy"


def test_each_headless_service_selects_exactly_the_pods_of_its_role_and_revision() -> None:
    objects = planned()
    labels = {
        role: item["spec"]["template"]["metadata"]["labels"] for role, item in deployments(objects).items()
    }
    for service in of_kind(objects, "Service"):
        selector = service["spec"]["selector"]
        chosen = [role for role, found in labels.items() if selector.items() <= found.items()]
        assert chosen == [service["metadata"]["labels"]["flowprefill.io/role"]]


def test_a_selector_always_matches_its_own_template() -> None:
    for item in of_kind(planned(), "Deployment"):
        labels = item["spec"]["template"]["metadata"]["labels"]
        assert item["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize(
    ("path", "node", "before", "after"), list(changes()), ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_live_change_leaves_pods_alone_and_any_other_makes_a_new_revision(
    path: str, node: dict[str, Any], before: dict[str, Any], after: dict[str, Any]
) -> None:
    old = [dict(o) for o in plan(parse_service(document(before)), PlanSettings())]
    new = [dict(o) for o in plan(parse_service(document(after)), PlanSettings())]
    if node["description"].endswith("Applied live."):
        assert templates(new) == templates(old)
    else:
        assert templates(new) != templates(old)
        names = [{d["metadata"]["name"] for d in of_kind(o, "Deployment")} for o in (old, new)]
        assert names[0] & names[1] == {"example-proxy"}


def test_the_two_documents_are_what_pods_can_read() -> None:
    service = parse_service(document(generation=7))
    objects = planned(generation=7)
    by_name = {item["metadata"]["name"]: item for item in of_kind(objects, "ConfigMap")}
    revision = restart_hash(service)
    fixed, live = by_name[f"example-{revision}"], by_name["example-live"]
    assert fixed["immutable"] is True
    assert "immutable" not in live
    assert PodConfig.from_json(fixed["data"]["config.json"]).revision == revision
    assert LiveConfig.from_json(live["data"]["live.json"]).generation == 7


@pytest.mark.parametrize("role", ["prefill", "decode", "proxy"])
def test_the_grace_period_is_longer_than_all_steps_of_stopping(role: str) -> None:
    steps = {"preStopSeconds": 7, "lameDuckSeconds": 11, "drainSeconds": 13}
    objects = planned({"termination": steps})
    assert pod(objects, role)["terminationGracePeriodSeconds"] > 7 + 11 + 13
    (container,) = pod(objects, role)["containers"]
    assert container["lifecycle"]["preStop"] == {"sleep": {"seconds": 7}}


def test_a_prefill_pod_may_also_wait_for_the_lease_of_its_kv() -> None:
    steps = {"preStopSeconds": 1, "lameDuckSeconds": 2, "drainSeconds": 3}
    objects = planned({"termination": steps, "kvTransfer": {"leaseSeconds": 500}})
    assert pod(objects, "prefill")["terminationGracePeriodSeconds"] > 1 + 2 + 3 + 500


def test_a_pod_has_its_whole_startup_time_before_a_probe_restarts_it() -> None:
    objects = planned({"prefill": {"startupTimeoutSeconds": 1799}})
    probe = pod(objects, "prefill")["containers"][0]["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] >= 1799
    assert "initialDelaySeconds" not in probe


def test_probes_ask_the_admin_port() -> None:
    for role in ("prefill", "decode", "proxy"):
        (container,) = pod(planned(), role)["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["api"] != ports["admin"]
        for probe, path in (("readinessProbe", "/ready"), ("livenessProbe", "/health")):
            assert container[probe]["httpGet"] == {"path": path, "port": "admin"}


def containers(objects: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for item in of_kind(objects, "Deployment"):
        spec = item["spec"]["template"]["spec"]
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            yield spec, container


def test_every_pod_keeps_to_the_restricted_pod_security_standard() -> None:
    """The rules of the "Restricted" policy at kubernetes.io, "Pod Security Standards"."""
    seen = 0
    for spec, container in containers(planned(HF)):
        seen += 1
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        kinds = {key for volume in spec["volumes"] for key in volume if key != "name"}
        assert kinds <= {"configMap", "secret", "emptyDir", "persistentVolumeClaim", "projected", "csi"}
    assert seen == 5


def test_every_mount_has_its_volume_and_every_volume_is_mounted() -> None:
    for changed in (
        {},
        HF,
        {"security": {"apiKeysSecretRef": {"name": "keys"}}},
        {"model": {"uri": "pvc://claim/m"}},
    ):
        for item in of_kind(planned(changed), "Deployment"):
            spec = item["spec"]["template"]["spec"]
            mounted = {m["name"] for _, c in containers([item]) for m in c["volumeMounts"]}
            assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_service_links_are_off_so_that_no_service_name_changes_an_engine() -> None:
    assert all(spec["enableServiceLinks"] is False for spec, _ in containers(planned()))


def test_only_a_proxy_has_a_token_and_it_can_only_read_endpoint_slices() -> None:
    objects = planned()
    assert pod(objects, "prefill")["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod(objects, "prefill")
    assert pod(objects, "proxy")["serviceAccountName"] == "example-proxy"
    (role,) = of_kind(objects, "Role")
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]


def test_shared_memory_grows_with_the_ranks_of_a_pod() -> None:
    def size_mib(ranks: int) -> int:
        volumes = pod(planned({"prefill": {"tensorParallelSize": ranks}}), "prefill")["volumes"]
        (shm,) = [volume["emptyDir"] for volume in volumes if volume["name"] == "shm"]
        assert shm["medium"] == "Memory"
        return int(shm["sizeLimit"].removesuffix("Mi"))

    assert size_mib(4) == 4 * size_mib(1) > 0


def test_threads_of_the_torch_engine_wait_without_spinning() -> None:
    env = {
        e["name"]: e.get("value")
        for e in pod(planned({"engine": {"threads": 3}}), "prefill")["containers"][0]["env"]
    }
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["OMP_WAIT_POLICY"] == "PASSIVE"
    assert env["KMP_BLOCKTIME"] == "0"


def test_a_downloaded_model_is_fetched_by_an_init_container_that_alone_sees_the_token() -> None:
    objects = planned(HF | {"prefill": {"replicas": 1}})
    for role in ("prefill", "decode"):
        spec = pod(objects, role)
        (init,) = spec["initContainers"]
        assert (*init["command"], *init["args"]) == (
            "flowprefill",
            "model",
            "pull",
            "hf://org/name",
            "--revision",
            "main",
            "--termination-log",
            "/dev/termination-log",
        )
        assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}} in init[
            "env"
        ]
        main = {e["name"]: e.get("value") for e in spec["containers"][0]["env"]}
        assert "HF_TOKEN" not in main
        assert main["HF_HUB_OFFLINE"] == "1"
    assert "initContainers" not in pod(objects, "proxy")


def test_pods_are_told_the_commit_of_their_revision_once_it_is_known_and_share_it_within_the_pod_alone() -> (
    None
):
    objects = planned(HF)
    kept = commit_map(HF)
    assert kept["immutable"] is True
    for role in ("prefill", "decode"):
        spec = pod(objects, role)
        (init,), (main, *_) = spec["initContainers"], spec["containers"]
        told = {entry["name"]: entry for entry in init["env"]}
        ref = told["FLOWPREFILL_MODEL_COMMIT"]["valueFrom"]["configMapKeyRef"]
        assert ref == {"name": kept["metadata"]["name"], "key": next(iter(kept["data"])), "optional": True}
        serving = {entry["name"]: entry.get("value") for entry in main["env"]}
        assert "FLOWPREFILL_MODEL_COMMIT" not in serving, "the file decides, and is there"
        place = serving["FLOWPREFILL_MODEL_PIN"]
        assert place == told["FLOWPREFILL_MODEL_PIN"]["value"]
        for container in (init, main):
            volume = next(
                m["name"] for m in container["volumeMounts"] if place.startswith(m["mountPath"] + "/")
            )
            assert "emptyDir" in next(v for v in spec["volumes"] if v["name"] == volume)


def test_the_commit_of_each_revision_has_a_name_of_its_own_that_fits_whatever_the_services_name() -> None:
    long = "a." * 100 + "z"
    names = [
        commit_map(merged(HF, changed), name=name)["metadata"]["name"]
        for name in ("example", long)
        for changed in ({}, {"engine": {"threads": 2}})
    ]
    assert len(set(names)) == 4
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", name) for name in names)


@pytest.mark.parametrize("uri", ["embedded://tiny", "file:///models/m", "pvc://claim/m"])
def test_nothing_is_fetched_for_a_model_that_is_there(uri: str) -> None:
    assert "initContainers" not in pod(planned({"model": {"uri": uri}}), "prefill")


def test_a_claim_for_the_cache_is_kept_unless_it_is_not_to_be_retained() -> None:
    def claim(retain: bool) -> dict[str, Any]:
        cache = {"persistentVolumeClaim": {"storage": "5Gi", "retain": retain}}
        (found,) = of_kind(
            planned({"model": {"uri": "hf://o/n", "cache": cache}}, uid="u-1"), "PersistentVolumeClaim"
        )
        return found

    assert "ownerReferences" not in claim(True)["metadata"]
    assert claim(False)["metadata"]["ownerReferences"][0]["uid"] == "u-1"
    assert claim(True)["spec"]["resources"] == {"requests": {"storage": "5Gi"}}


def test_every_other_object_belongs_to_the_service() -> None:
    for item in planned(HF, uid="u-1"):
        (owner,) = item["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == (
            "FlowPrefillService",
            "example",
            "u-1",
            True,
        )
        assert item["metadata"]["labels"]["flowprefill.io/owner-uid"] == "u-1"


def test_the_uid_of_a_service_made_anew_changes_no_pod() -> None:
    assert templates(planned(uid="u-1")) == templates(planned(uid="u-2"))


def test_an_autoscaler_owns_the_number_of_pods() -> None:
    scaling = {"minReplicas": 2, "maxReplicas": 5, "targetUtilizationPercent": 60}
    objects = planned({"prefill": {"autoscaling": scaling}})
    assert "replicas" not in deployments(objects)["prefill"]["spec"]
    assert deployments(objects)["decode"]["spec"]["replicas"] == 1
    (scaler,) = of_kind(objects, "HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployments(objects)["prefill"]["metadata"]["name"]
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (2, 5)


def test_keda_scales_on_the_load_in_pods_over_the_target_share() -> None:
    scaling = {
        "maxReplicas": 5,
        "provider": "Keda",
        "prometheusAddress": "http://p:9090",
        "targetUtilizationPercent": 60,
    }
    objects = planned({"prefill": {"autoscaling": scaling}})
    assert not of_kind(objects, "HorizontalPodAutoscaler")
    (scaler,) = of_kind(objects, "ScaledObject")
    (trigger,) = scaler["spec"]["triggers"]
    assert trigger["metadata"]["threshold"] == "0.6"
    assert trigger["metadata"]["serverAddress"] == "http://p:9090"
    assert 'service="example"' in trigger["metadata"]["query"]


def test_a_role_that_may_have_several_pods_gives_up_one_at_a_time() -> None:
    changed = {
        "prefill": {"replicas": 1},
        "decode": {"replicas": 2},
        "proxy": {"autoscaling": {"minReplicas": 1, "maxReplicas": 2}},
    }
    objects = planned(changed)
    budgets = {
        item["metadata"]["labels"]["flowprefill.io/role"]: item["spec"]
        for item in of_kind(objects, "PodDisruptionBudget")
    }
    assert set(budgets) == {"decode", "proxy"}
    for role, budget in budgets.items():
        assert budget["maxUnavailable"] == 1
        assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
        assert [r for r in deployments(objects) if selects(budget["selector"], pod_labels(objects, r))] == [
            role
        ]
    one = {"autoscaling": {"minReplicas": 1, "maxReplicas": 1}}
    assert not of_kind(planned({"prefill": one, "decode": {"replicas": 0}}), "PodDisruptionBudget")


def ingress(objects: list[dict[str, Any]], pod: dict[str, str]) -> dict[str, list[dict[str, Any]] | None]:
    """For each open port, by its name, of a pod with these labels, who may reach it; None is everybody.

    As a cluster reads policies: what selects the pod adds up, and without any policy all would be open.
    """
    found: dict[str, list[dict[str, Any]] | None] = {}
    selecting = [
        p["spec"] for p in of_kind(objects, "NetworkPolicy") if selects(p["spec"]["podSelector"], pod)
    ]
    assert selecting, f"{pod} is open to all"
    for spec in selecting:
        assert spec["policyTypes"] == ["Ingress"]
        for rule in spec["ingress"]:
            for port in rule["ports"]:
                assert port["port"] not in found, "each port is opened in one place"
                found[port["port"]] = rule.get("from")
    return found


def selects(selector: dict[str, Any], pod: dict[str, str]) -> bool:
    """Whether a label selector selects the pod."""
    for term in selector.get("matchExpressions", ()):
        inside = pod.get(term["key"]) in term["values"]
        if inside != {"In": True, "NotIn": False}[term["operator"]]:
            return False
    return selector.get("matchLabels", {}).items() <= pod.items()


def pod_labels(objects: list[dict[str, Any]], role: str) -> dict[str, str]:
    found: dict[str, str] = deployments(objects)[role]["spec"]["template"]["metadata"]["labels"]
    return found


def test_clients_reach_the_api_of_proxies_and_nothing_else() -> None:
    objects = planned()
    to_proxies = ingress(objects, pod_labels(objects, "proxy"))
    assert [port for port, peers in to_proxies.items() if peers is None] == ["api"]
    for role in ("prefill", "decode"):
        to_workers = ingress(objects, pod_labels(objects, role))
        assert None not in to_workers.values()
        (peer,) = to_workers["api"] or ()
        assert list(peer) == ["podSelector"]
        reached_from = [
            r for r in deployments(objects) if selects(peer["podSelector"], pod_labels(objects, r))
        ]
        assert reached_from == ["proxy"]


def test_kv_blocks_are_for_the_decode_pods_of_the_same_revision_alone() -> None:
    objects = planned()
    prefill, decode = pod_labels(objects, "prefill"), pod_labels(objects, "decode")
    (peer,) = ingress(objects, prefill)["kv"] or ()
    assert list(peer) == ["podSelector"]
    assert selects(peer["podSelector"], decode)
    for other in (
        {**decode, "flowprefill.io/revision": "0123456789"},
        {**decode, "flowprefill.io/service": "another"},
        prefill,
        pod_labels(objects, "proxy"),
        {"app": "stranger"},
    ):
        assert not selects(peer["podSelector"], other)
    assert "kv" not in ingress(objects, decode)
    assert "kv" not in ingress(objects, {**prefill, "flowprefill.io/revision": "0123456789"})
    colocated = planned({"mode": "Colocated"})
    assert set(ingress(colocated, pod_labels(colocated, "colocated"))) == {"api", "admin"}


MONITORING = {"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}
OWN = {"podSelector": {"matchLabels": {"flowprefill.io/service": "example"}}}
OPERATOR = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "flowprefill-system"}}}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (PlanSettings(), [OWN, {"namespaceSelector": {}}]),
        (PlanSettings(monitoring_from=()), [OWN]),
        (PlanSettings(monitoring_from=(), operator_namespace="flowprefill-system"), [OWN, OPERATOR]),
        (
            PlanSettings(monitoring_from=(MONITORING,), operator_namespace="flowprefill-system"),
            [OWN, OPERATOR, MONITORING],
        ),
    ],
    ids=["no-operator", "nobody-else", "operator", "operator-and-prometheus"],
)
def test_admin_ports_are_for_the_service_the_operator_and_who_monitors(
    settings: PlanSettings, expected: list[dict[str, Any]]
) -> None:
    objects = [dict(item) for item in plan(parse_service(document()), settings)]
    for role in ("prefill", "decode", "proxy"):
        assert ingress(objects, pod_labels(objects, role))["admin"] == expected


def test_the_annotated_service_reports_the_address_that_is_planned_for_it() -> None:
    (service,) = load_services(SAMPLES[0].parents[2] / "docs" / "reference" / "annotated-service.yaml")
    assert service.status is not None
    assert url(Context(service, PlanSettings())) == service.status.url
    (clients,) = [
        item
        for item in of_kind([dict(o) for o in plan(service, PlanSettings())], "Service")
        if item["spec"].get("clusterIP") != "None"
    ]
    name, namespace = clients["metadata"]["name"], clients["metadata"]["namespace"]
    (port,) = clients["spec"]["ports"]
    assert service.status.url == f"http://{name}.{namespace}.svc:{port['port']}/v1"


def test_a_pod_template_changes_the_planned_container_by_its_name() -> None:
    changed = {
        "nodeSelector": {"gpu": "yes"},
        "containers": [
            {"name": "prefill", "env": [{"name": "EXTRA", "value": "1"}]},
            {"name": "sidecar", "image": "busybox"},
        ],
    }
    objects = planned({"prefill": {"podTemplate": {"metadata": {"labels": {"team": "a"}}, "spec": changed}}})
    spec = pod(objects, "prefill")
    own, sidecar = spec["containers"]
    assert own["command"] == ["flowprefill", "serve"]
    assert {"EXTRA", "POD_NAME"} <= {e["name"] for e in own["env"]}
    assert sidecar == {"name": "sidecar", "image": "busybox"}
    assert spec["nodeSelector"] == {"gpu": "yes"}
    assert deployments(objects)["prefill"]["spec"]["template"]["metadata"]["labels"]["team"] == "a"


def test_a_pod_template_cannot_take_a_pod_out_of_its_service() -> None:
    stolen = {"metadata": {"labels": {"flowprefill.io/role": "other"}}}
    labels = deployments(planned({"prefill": {"podTemplate": stolen}}))
    assert "other" not in labels


def test_the_spec_itself_is_never_changed_by_planning() -> None:
    service = parse_service(
        document(
            merged(
                document()["spec"],
                {"prefill": {"podTemplate": {"spec": {"containers": [{"name": "prefill", "env": []}]}}}},
            )
        )
    )
    before = copy.deepcopy(service.model_dump())
    plan(service, PlanSettings())
    assert service.model_dump() == before


def test_images_and_pull_secrets_are_the_ones_asked_for() -> None:
    settings = PlanSettings(images={"torch": "t:1", "simulated": "s:1", "vllm": "v:1"}, proxy_image="p:1")
    body = document(
        merged(document()["spec"], {"engine": {"type": "vllm"}, "imagePullSecrets": [{"name": "reg"}]})
    )
    objects = [dict(item) for item in plan(parse_service(body), settings)]
    assert pod(objects, "prefill")["containers"][0]["image"] == "v:1"
    assert pod(objects, "proxy")["containers"][0]["image"] == "p:1"
    assert pod(objects, "decode")["imagePullSecrets"] == [{"name": "reg"}]


def test_pull_secrets_of_service_and_operator_are_both_used_and_each_once() -> None:
    body = document(merged(document()["spec"], {"imagePullSecrets": [{"name": "reg"}, {"name": "own"}]}))
    settings = PlanSettings(image_pull_secrets=("operator", "reg"))
    objects = [dict(item) for item in plan(parse_service(body), settings)]
    for role in ("prefill", "decode", "proxy"):
        assert pod(objects, role)["imagePullSecrets"] == [
            {"name": "reg"},
            {"name": "own"},
            {"name": "operator"},
        ]
    assert "imagePullSecrets" not in pod(planned(), "proxy")


def test_on_this_machine_proxies_find_pods_in_a_file_and_keys_where_they_lie() -> None:
    places = LocalPlaces(
        endpoints=Path("/state/endpoints"),
        claims=Path("/claims"),
        cache=Path("/home/u/.cache"),
        files=Path("/home/u/files"),
    )
    body = document(
        merged(document()["spec"], {"security": {"apiKeysSecretRef": {"name": "keys", "key": "k"}}})
    )
    objects = [dict(item) for item in plan(parse_service(body), PlanSettings(local=places))]
    args = pod(objects, "proxy")["containers"][0]["args"]
    assert "--discover" not in args
    assert "--endpoints" in args
    (config,) = [
        o["data"]["config.json"] for o in of_kind(objects, "ConfigMap") if "config.json" in o["data"]
    ]
    assert PodConfig.from_json(config).api_keys_file == "/home/u/files/keys/k"
