"""Claims about the objects of a service, as a cluster would see them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from flowprefill_crd import LiveConfig, PodConfig, load_services, parse_service, restart_hash
from flowprefill_operator.plan import plan
from flowprefill_operator.resources.base import Context
from flowprefill_operator.resources.service import url
from flowprefill_operator.settings import PlanSettings
from support.planned import deployments, of_kind, planned, pod, pod_labels, selects
from support.services import changes, document, merged

SAMPLES = sorted((Path(__file__).parents[3] / "crds" / "samples").glob("*.yaml"))

HF = {"model": {"uri": "hf://org/name", "secretRef": {"name": "hub", "key": "token"}}}


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
