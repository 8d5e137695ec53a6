"""The pods of a service: how they start and stop, what they may do, what they mount, and what a user changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from flowprefill_crd import PodConfig, parse_service
from flowprefill_operator.plan import plan
from flowprefill_operator.resources.base import Context
from flowprefill_operator.resources.model_commit import model_commit
from flowprefill_operator.settings import LocalPlaces, PlanSettings
from support.planned import containers, deployments, of_kind, planned, pod
from support.services import MINIMAL_SPEC, document, merged

HF = {"model": {"uri": "hf://org/name", "secretRef": {"name": "hub", "key": "token"}}}


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


def commit_map(changed: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    """The ConfigMap with the commit of such a service's model."""
    service = parse_service(document(merged(MINIMAL_SPEC, changed), **metadata))
    return dict(model_commit(Context(service, PlanSettings()), "0" * 40))


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
