"""The pods of a service whose engine is vLLM."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from flowprefill_crd import load_services, parse_service
from flowprefill_crd.samples import sample_path
from flowprefill_operator.plan import plan
from flowprefill_operator.settings import LocalPlaces, PlanSettings
from support.planned import containers, deployments, of_kind, planned, pod, pod_labels, selects
from support.services import document, merged

VLLM: dict[str, Any] = {"engine": {"type": "vllm"}}
HF: dict[str, Any] = {"model": {"uri": "hf://org/name", "secretRef": {"name": "hub", "key": "token"}}}
GPU = "nvidia.com/gpu"


def vllm(changed: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The objects of a vLLM service."""
    return planned(merged(VLLM, changed or {}))


def own(objects: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """A role's own container."""
    found: dict[str, Any] = pod(objects, role)["containers"][0]
    return found


def env(objects: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """Variables of a role's own container: their values, or what they are taken from."""
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in own(objects, role)["env"]}


def written_below(objects: list[dict[str, Any]], role: str, path: str) -> str:
    """Name of the volume that a path of the container lies in; fails for one that is read-only or in the image."""
    mounts = own(objects, role)["volumeMounts"]
    (mount,) = [m for m in mounts if path == m["mountPath"] or path.startswith(m["mountPath"] + "/")]
    assert "readOnly" not in mount
    return str(mount["name"])


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_pod_has_its_whole_startup_time_and_is_not_asked_all_the_while(role: str) -> None:
    probe = own(vllm({role: {"startupTimeoutSeconds": 1201}}), role)["startupProbe"]
    period_s, times = probe["periodSeconds"], probe["failureThreshold"]
    assert 1201 <= period_s * times < 1201 + period_s
    assert probe["httpGet"] == {"path": "/ready", "port": "admin"}
    assert times < 300


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_shared_memory_has_room_for_the_queues_of_all_ranks(ranks: int) -> None:
    """vLLM 0.32.0: ten chunks of 16 MiB from the engine to its ranks, ten of 24 MiB from each rank back."""
    volumes = pod(vllm({"prefill": {"tensorParallelSize": ranks}}), "prefill")["volumes"]
    (shm,) = [volume["emptyDir"] for volume in volumes if volume["name"] == "shm"]
    assert shm["medium"] == "Memory"
    assert int(shm["sizeLimit"].removesuffix("Mi")) >= 10 * 16 + ranks * 10 * 24 + ranks * 128
    mounts = own(vllm(), "prefill")["volumeMounts"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in mounts


def test_whatever_vllm_and_its_compilers_keep_is_kept_in_a_volume_of_the_pod() -> None:
    """Also where the model cache is a claim that pods share."""
    for changed in ({}, HF):
        objects = vllm(changed)
        for role in ("prefill", "decode"):
            variables = env(objects, role)
            for name in (
                "VLLM_CACHE_ROOT",
                "VLLM_CONFIG_ROOT",
                "TORCHINDUCTOR_CACHE_DIR",
                "TRITON_CACHE_DIR",
                "CUDA_CACHE_PATH",
                "FLASHINFER_WORKSPACE_BASE",
            ):
                volume = written_below(objects, role, variables[name])
                (source,) = [v for v in pod(objects, role)["volumes"] if v["name"] == volume]
                assert set(source) == {"name", "emptyDir"}
                assert source["emptyDir"]["sizeLimit"] == "10Gi"
    assert "vllm-cache" not in {v["name"] for v in pod(vllm(), "proxy")["volumes"]}


@pytest.mark.parametrize("uri", ["hf://org/name", "embedded://tiny", "pvc://claim/m"])
def test_servers_neither_ask_a_hub_nor_report_their_use_and_see_no_token(uri: str) -> None:
    objects = vllm(merged(HF, {"model": {"uri": uri}}) if uri.startswith("hf") else {"model": {"uri": uri}})
    for role in ("prefill", "decode"):
        variables = env(objects, role)
        assert variables["HF_HUB_OFFLINE"] == "1"
        assert variables["VLLM_NO_USAGE_STATS"] == "1"
        assert "HF_TOKEN" not in variables
        names = [e["name"] for e in own(objects, role)["env"]]
        assert len(names) == len(set(names))


def test_no_service_called_vllm_reaches_a_pod_as_vllm_port() -> None:
    for spec, container in containers(vllm()):
        assert spec["enableServiceLinks"] is False
        assert "VLLM_PORT" not in {e["name"] for e in container.get("env", ())}


def test_pods_know_their_own_address_and_leave_the_choice_of_cores_to_the_node() -> None:
    variables = env(vllm({"engine": {"threads": 3}}), "prefill")
    for name in ("POD_IP", "VLLM_HOST_IP"):
        assert variables[name] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert (variables["OMP_NUM_THREADS"], variables["OMP_WAIT_POLICY"]) == ("3", "PASSIVE")


def test_variables_of_vllm_are_for_its_pods_alone() -> None:
    mine = {name for name in env(vllm(), "prefill") if name.startswith(("VLLM", "UCX", "TRITON", "CUDA"))}
    assert mine
    assert not mine & set(env(vllm(), "proxy"))
    for engine in ("torch", "simulated"):
        objects = planned({"engine": {"type": engine}})
        assert not mine & set(env(objects, "prefill"))
        assert "limits" not in own(objects, "prefill")["resources"]
        assert own(objects, "prefill")["startupProbe"]["periodSeconds"] == 1


@pytest.mark.parametrize(
    ("changed", "limits"),
    [
        ({}, {GPU: "1"}),
        ({"tensorParallelSize": 4}, {GPU: "4"}),
        ({"resources": {"limits": {"memory": "64Gi"}}}, {"memory": "64Gi", GPU: "1"}),
        ({"resources": {"limits": {"rdma/hca": 1}}}, {"rdma/hca": "1", GPU: "1"}),
        ({"tensorParallelSize": 2, "resources": {"limits": {GPU: 4}}}, {GPU: "4"}),
        ({"resources": {"limits": {GPU: 0}}}, {GPU: "0"}),
        ({"resources": {"limits": {"nvidia.com/mig-3g.40gb": 1}}}, {"nvidia.com/mig-3g.40gb": "1"}),
        ({"resources": {"limits": {"amd.com/gpu": 1}}}, {"amd.com/gpu": "1"}),
        ({"resources": {"claims": [{"name": "gpus"}]}}, None),
    ],
    ids=str,
)
def test_a_pod_asks_for_a_gpu_a_rank_unless_the_spec_says_what_it_asks_for(
    changed: dict[str, Any], limits: dict[str, str] | None
) -> None:
    for role in ("prefill", "decode"):
        assert own(vllm({role: changed}), role)["resources"].get("limits") == limits


@pytest.mark.parametrize(
    "resources",
    [
        {"limits": {"amd.com/gpu": 2}},
        {"claims": [{"name": "gpus"}]},
        {"requests": {GPU: 1}, "limits": {GPU: 1}},
    ],
    ids=str,
)
def test_gpus_that_a_pod_template_names_are_the_only_ones(resources: dict[str, Any]) -> None:
    template = {"spec": {"containers": [{"name": "prefill", "resources": resources}]}}
    assert own(vllm({"prefill": {"podTemplate": template}}), "prefill")["resources"] == resources
    sidecar = {"spec": {"containers": [{"name": "sidecar", "image": "i", "resources": resources}]}}
    assert own(vllm({"prefill": {"podTemplate": sidecar}}), "prefill")["resources"]["limits"] == {GPU: "1"}


def test_decode_pods_reach_the_side_channel_and_the_ports_that_ucx_listens_on_and_nobody_else_does() -> None:
    objects = vllm()
    prefill, decode = pod_labels(objects, "prefill"), pod_labels(objects, "decode")
    first, last = map(int, env(objects, "prefill")["UCX_TCP_PORT_RANGE"].split("-"))
    opened = [
        (port, rule["from"])
        for policy in of_kind(objects, "NetworkPolicy")
        if selects(policy["spec"]["podSelector"], prefill)
        for rule in policy["spec"]["ingress"]
        for port in rule["ports"]
    ]
    for port in ("kv", first):
        ((found, (peer,)),) = [item for item in opened if item[0]["port"] == port]
        assert found["protocol"] == "TCP"
        assert selects(peer["podSelector"], decode)
        assert not selects(peer["podSelector"], {**decode, "flowprefill.io/revision": "0123456789"})
        assert not selects(peer["podSelector"], pod_labels(objects, "proxy"))
    assert [port.get("endPort") for port, _ in opened if port["port"] == first] == [last]
    numbers = {port["containerPort"] for port in own(objects, "prefill")["ports"]}
    assert not numbers & set(range(first, last + 1))
    assert "--kv-port" in own(objects, "prefill")["args"]


def test_ucx_has_ports_for_every_rank_of_the_widest_pod() -> None:
    """NIXL 1.5.1 as vLLM sets it up: five workers a rank, each listening once on each network device."""
    first, last = map(int, env(vllm(), "decode")["UCX_TCP_PORT_RANGE"].split("-"))
    assert last - first + 1 > 64 * 5


def test_colocated_pods_open_no_port_for_kv() -> None:
    objects = vllm({"mode": "Colocated"})
    assert "UCX_TCP_PORT_RANGE" not in env(objects, "colocated")
    assert {port["name"] for port in own(objects, "colocated")["ports"]} == {"api", "admin"}
    assert not [p for p in of_kind(objects, "NetworkPolicy") if "-kv-" in p["metadata"]["name"]]


def test_pods_keep_to_the_restricted_pod_security_standard() -> None:
    for spec, container in containers(vllm(HF)):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_on_this_machine_the_users_own_caches_and_any_free_port_serve() -> None:
    places = LocalPlaces(endpoints=Path("/e"), claims=Path("/c"), cache=Path("/home/u/.cache"))
    service = parse_service(document(merged(document()["spec"], VLLM)))
    objects = [dict(item) for item in plan(service, PlanSettings(local=places))]
    variables = env(objects, "prefill")
    assert not {"VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "UCX_TCP_PORT_RANGE"} & set(variables)
    assert variables["VLLM_NO_USAGE_STATS"] == "1"
    assert "vllm-cache" not in {v["name"] for v in pod(objects, "prefill")["volumes"]}


@pytest.mark.parametrize(
    ("sample", "gpus"),
    [
        ("vllm-cpu", {"colocated": 0}),
        ("vllm-8b", {"colocated": 1}),
        ("vllm-2p2d", {"prefill": 2, "decode": 2}),
        ("vllm-70b-tp4", {"prefill": 4, "decode": 4}),
        ("vllm-moe", {"prefill": 2, "decode": 2}),
    ],
)
def test_samples_take_the_gpus_that_they_speak_of(sample: str, gpus: dict[str, int]) -> None:
    """Of all pods of a role together."""
    (service,) = load_services(sample_path(f"{sample}.yaml"))
    objects = [dict(item) for item in plan(service, PlanSettings())]
    found = {
        role: item["spec"]["replicas"] * int(own(objects, role)["resources"]["limits"][GPU])
        for role, item in deployments(objects).items()
        if role != "proxy"
    }
    assert found == gpus
    for role in gpus:
        (shm,) = [v["emptyDir"] for v in pod(objects, role)["volumes"] if v["name"] == "shm"]
        memory = {**own(objects, role)["resources"]["requests"], **own(objects, role)["resources"]["limits"]}
        assert int(shm["sizeLimit"].removesuffix("Mi")) < 1024 * int(memory["memory"].removesuffix("Gi")) / 4


def test_the_sample_for_cpus_names_the_image_that_is_built_for_them() -> None:
    (service,) = load_services(sample_path("vllm-cpu.yaml"))
    built = (Path(__file__).parents[4] / "images" / "build.sh").read_text("utf-8")
    name, _, tag = (service.spec.engine.image or "").removeprefix("flowprefill/").partition(":")
    assert f"{name}) file=images/serving-vllm/Dockerfile device=cpu" in built
    assert tag == version("flowprefill")
