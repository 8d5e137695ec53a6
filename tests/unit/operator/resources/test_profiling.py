"""The profiling Job is a prefill pod that measures, and is asked for again exactly when what it measures changes."""

from __future__ import annotations

from typing import Any

import pytest

from flowprefill_crd import PodConfig, parse_service
from flowprefill_operator.plan import plan
from flowprefill_operator.resources.base import Context
from flowprefill_operator.resources.profiling import profile_config_map, profiles_of
from flowprefill_operator.settings import PlanSettings
from support.services import MINIMAL_SPEC, document, merged

JOB = {"scheduling": {"predictor": {"profilingJob": True}}}
USERS = {
    "prefill": {
        "tensorParallelSize": 2,
        "startupTimeoutSeconds": 600,
        "resources": {"limits": {"nvidia.com/gpu": 2}},
        "podTemplate": {
            "metadata": {"labels": {"team": "a", "flowprefill.io/role": "prefill"}},
            "spec": {
                "nodeSelector": {"gpu": "yes"},
                "tolerations": [{"operator": "Exists"}],
                "priorityClassName": "serving",
                "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "two"}],
                "volumes": [{"name": "own", "emptyDir": {}}],
                "containers": [
                    {
                        "name": "prefill",
                        "env": [{"name": "OWN", "value": "1"}],
                        "volumeMounts": [{"name": "own", "mountPath": "/own"}],
                    },
                    {"name": "sidecar", "image": "never-ends"},
                ],
            },
        },
    }
}


def planned(
    changed: dict[str, Any], settings: PlanSettings | None = None, **metadata: Any
) -> list[dict[str, Any]]:
    spec = merged(merged(MINIMAL_SPEC, JOB), changed)
    service = parse_service(document(spec, **metadata))
    return [dict(item) for item in plan(service, settings or PlanSettings())]


def job(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = [item for item in objects if item["kind"] == "Job"]
    return found


def prefill_pod(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (spec,) = [
        item["spec"]["template"]["spec"]
        for item in objects
        if item["kind"] == "Deployment"
        and item["metadata"]["labels"]["flowprefill.io/role"] in ("prefill", "colocated")
    ]
    return dict(spec)


def named(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (found,) = [item for item in items if item["name"] == name]
    return found


def test_there_is_no_job_unless_it_is_asked_for() -> None:
    objects = plan(parse_service(document()), PlanSettings())
    assert "Job" not in {item["kind"] for item in objects}


def test_the_profiler_is_like_a_prefill_pod_in_all_that_a_measurement_depends_on() -> None:
    objects = planned(USERS)
    pod, prefill = job(objects)["spec"]["template"]["spec"], prefill_pod(objects)
    for field in (
        "nodeSelector",
        "tolerations",
        "priorityClassName",
        "resourceClaims",
        "securityContext",
        "enableServiceLinks",
        "automountServiceAccountToken",
    ):
        assert pod[field] == prefill[field], field
    (own,) = pod["containers"]
    serving = named(prefill["containers"], "prefill")
    for field in ("image", "imagePullPolicy", "env", "resources", "securityContext"):
        assert own[field] == serving[field], field
    assert {"name": "OWN", "value": "1"} in own["env"]
    assert own["resources"] == {"limits": {"nvidia.com/gpu": "2"}}


def test_the_profiler_measures_once_and_leaves_its_result_as_its_last_words() -> None:
    pod = job(planned(USERS))["spec"]["template"]["spec"]
    (own,) = pod["containers"]
    assert own["command"] == ["flowprefill", "profile"]
    assert own["args"][:2] == ["--config", "/etc/flowprefill/config/config.json"]
    assert own["args"][2:] == ["--output", "/dev/termination-log"]
    assert "terminationMessagePath" not in own
    assert not {"readinessProbe", "livenessProbe", "startupProbe", "lifecycle", "ports"} & set(own)
    assert pod["restartPolicy"] == "Never"
    assert pod["activeDeadlineSeconds"] >= 600


def test_its_volumes_are_mounted_and_none_serves_requests() -> None:
    pod = job(planned(merged(USERS, {"security": {"apiKeysSecretRef": {"name": "keys"}}})))["spec"][
        "template"
    ]["spec"]
    (own,) = pod["containers"]
    mounted = {mount["name"] for mount in own["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert mounted == {"config", "tmp", "shm", "own"}


def test_it_reads_a_document_of_its_own_that_asks_for_no_profile() -> None:
    objects = planned({})
    volume = named(job(objects)["spec"]["template"]["spec"]["volumes"], "config")
    (config,) = [
        item
        for item in objects
        if item["kind"] == "ConfigMap" and item["metadata"]["name"] == volume["configMap"]["name"]
    ]
    assert config["immutable"] is True
    assert "flowprefill.io/revision" not in config["metadata"]["labels"]
    read = PodConfig.from_json(config["data"]["config.json"])
    assert read.predictor.profile_file is None
    assert read.model.uri == MINIMAL_SPEC["model"]["uri"]


def test_a_model_is_fetched_for_the_profiler_as_for_a_prefill_pod() -> None:
    objects = planned({"model": {"uri": "hf://org/name"}})
    pod = job(objects)["spec"]["template"]["spec"]
    assert pod["initContainers"] == prefill_pod(objects)["initContainers"]


@pytest.mark.parametrize("mode", ["Disaggregated", "Colocated"])
def test_prefill_pods_start_from_the_config_map_that_has_the_jobs_name(mode: str) -> None:
    spec = merged(merged(MINIMAL_SPEC, JOB), {"mode": mode})
    context = Context(parse_service(document(spec, uid="u-1")), PlanSettings())
    objects = [dict(item) for item in plan(context.service, context.settings)]
    result: dict[str, Any] = profile_config_map(context, '{"points": []}')
    volume = named(prefill_pod(objects)["volumes"], "profile")
    assert volume["configMap"] == {"name": result["metadata"]["name"]}
    assert result["metadata"]["name"] == job(objects)["metadata"]["name"]
    assert result["metadata"]["ownerReferences"][0]["uid"] == "u-1"
    (config,) = [
        item["data"]["config.json"]
        for item in objects
        if item["kind"] == "ConfigMap"
        and item.get("immutable")
        and "flowprefill.io/revision" in item["metadata"]["labels"]
    ]
    place = PodConfig.from_json(config).predictor.profile_file
    serving = next(c for c in prefill_pod(objects)["containers"] if c["name"] == "prefill")
    mount = named(serving["volumeMounts"], "profile")
    assert place == f"{mount['mountPath']}/{next(iter(result['data']))}"
    assert result["data"] == {"profile.json": '{"points": []}'}


@pytest.mark.parametrize(
    "changed",
    [
        {"model": {"uri": "embedded://other"}},
        {"model": {"maxModelLen": 4096}},
        {"engine": {"type": "simulated"}},
        {"engine": {"dtype": "bfloat16"}},
        {"engine": {"image": "own:1"}},
        {"engine": {"threads": 2}},
        {"engine": {"args": ["--fast"]}},
        {"prefill": {"tensorParallelSize": 2}},
        {"prefill": {"resources": {"limits": {"cpu": "4"}}}},
        {"prefill": {"podTemplate": {"spec": {"nodeSelector": {"gpu": "other"}}}}},
    ],
    ids=str,
)
def test_what_the_times_depend_on_asks_for_another_measurement(changed: dict[str, Any]) -> None:
    assert job(planned(changed))["metadata"]["name"] != job(planned({}))["metadata"]["name"]


def test_another_image_of_the_engine_asks_for_another_measurement() -> None:
    newer = PlanSettings(images={"torch": "t:2", "simulated": "s:2", "vllm": "v:2"})
    assert job(planned({}, newer))["metadata"]["name"] != job(planned({}))["metadata"]["name"]


def test_a_revision_that_keeps_its_images_keeps_its_profile_under_a_newer_operator() -> None:
    older = PlanSettings(images={"torch": "t:1", "simulated": "s:1", "vllm": "v:1"}, proxy_image="p:1")
    newer = PlanSettings(images={"torch": "t:2", "simulated": "s:2", "vllm": "v:2"}, proxy_image="p:2")
    assert planned({}, newer) != planned({}, older)
    recorded = {"prefill": "t:1", "decode": "t:1", "proxy": "p:1"}
    assert planned({}, newer.pinned(recorded)) == planned({}, older)


def test_the_profiles_that_deployments_need_are_told_from_their_pods() -> None:
    objects = planned({})
    assert profiles_of(objects) == {job(objects)["metadata"]["name"]}
    given = {"scheduling": {"predictor": {"profilingJob": False, "profileConfigMap": "given"}}}
    assert profiles_of(planned(given)) == {"given"}
    assert profiles_of(plan(parse_service(document()), PlanSettings())) == frozenset()


@pytest.mark.parametrize(
    "changed",
    [
        {"prefill": {"replicas": 5}},
        {"prefill": {"podTemplate": {"metadata": {"labels": {"team": "b"}}}}},
        {"decode": {"maxBatchSize": 8, "resources": {"limits": {"cpu": "2"}}}},
        {"proxy": {"maxBodyBytes": 2048}},
        {"termination": {"drainSeconds": 1}},
        {"kvTransfer": {"maxRetries": 2}},
        {"observability": {"logFormat": "text"}},
        {"security": {"apiKeysSecretRef": {"name": "keys"}}},
        {"scheduling": {"policy": "edf", "predictor": {"warmup": False}}},
        {"imagePullSecrets": [{"name": "registry"}]},
    ],
    ids=str,
)
def test_what_they_do_not_depend_on_keeps_the_profile_over_revisions(changed: dict[str, Any]) -> None:
    before, after = planned({}, generation=1), planned(changed, generation=2)
    assert job(after)["metadata"] == job(before)["metadata"]

    def config(objects: list[dict[str, Any]]) -> dict[str, Any]:
        name = named(job(objects)["spec"]["template"]["spec"]["volumes"], "config")["configMap"]["name"]
        return next(o for o in objects if o["kind"] == "ConfigMap" and o["metadata"]["name"] == name)

    assert config(after) == config(before)


def test_no_selector_of_the_service_takes_the_profiler_for_one_that_serves() -> None:
    objects = planned(USERS)
    labels = job(objects)["spec"]["template"]["metadata"]["labels"]
    assert labels["flowprefill.io/role"] == "profiler"
    assert labels["team"] == "a"
    assert "flowprefill.io/revision" not in labels
    for item in objects:
        match item["kind"], item.get("spec", {}):
            case "Service", {"selector": selector}:
                assert not selector.items() <= labels.items()
            case "Deployment" | "PodDisruptionBudget", {"selector": {"matchLabels": selector}}:
                assert not selector.items() <= labels.items()
            case "PodMonitor", {"selector": {"matchExpressions": [term]}}:
                assert (term["key"], term["operator"]) == ("flowprefill.io/role", "NotIn")
                assert labels[term["key"]] in term["values"]


def test_a_pod_template_without_the_own_container_is_planned_all_the_same() -> None:
    """What it makes of the Deployment is the cluster's to refuse."""
    gone = {"containers": [{"name": "prefill", "$patch": "delete"}, {"name": "other", "image": "i"}]}
    pod = job(planned({"prefill": {"podTemplate": {"spec": gone}}}))["spec"]["template"]["spec"]
    assert [container["name"] for container in pod["containers"]] == ["profiler"]
