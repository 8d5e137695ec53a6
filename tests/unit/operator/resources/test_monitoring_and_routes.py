"""PodMonitor and HTTPRoute: who is found, how series are named, where clients come in."""

from __future__ import annotations

from typing import Any

from flowprefill_crd import parse_service
from flowprefill_operator.plan import plan
from flowprefill_operator.settings import PlanSettings
from support.services import MINIMAL_SPEC, document, merged


def planned(changed: dict[str, Any], **metadata: Any) -> list[dict[str, Any]]:
    service = parse_service(document(merged(MINIMAL_SPEC, changed), **metadata))
    return [dict(item) for item in plan(service, PlanSettings())]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in objects if item["kind"] == kind]


def test_one_monitor_finds_the_pods_of_every_role_at_their_admin_port() -> None:
    for mode, roles in (
        ("Disaggregated", {"prefill", "decode", "proxy"}),
        ("Colocated", {"colocated", "proxy"}),
    ):
        objects = planned({"mode": mode, "proxy": {"portAdmin": 9100}})
        (monitor,) = of_kind(objects, "PodMonitor")
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        found = set()
        for item in of_kind(objects, "Deployment"):
            template = item["spec"]["template"]
            labels = template["metadata"]["labels"]
            ports = {p["name"] for c in template["spec"]["containers"] for p in c["ports"]}
            if (
                monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
                and endpoint["port"] in ports
            ):
                found.add(labels["flowprefill.io/role"])
        assert found == roles
        assert endpoint["path"] == "/metrics"
        assert endpoint["port"] == "admin"


def test_series_say_service_role_and_revision_and_keep_their_own_labels() -> None:
    name = "n" * 70
    (monitor,) = of_kind(planned({}, name=name), "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    made = {
        rule["targetLabel"]: rule.get("replacement") or rule.get("sourceLabels")
        for rule in endpoint["relabelings"]
    }
    # Prometheus: a pod's label a.b/c is __meta_kubernetes_pod_label_a_b_c.
    assert made == {"service": name, "role": ["__meta_kubernetes_pod_label_flowprefill_io_role"]}
    assert endpoint["honorLabels"] is True
    assert monitor["spec"]["podTargetLabels"] == ["flowprefill.io/revision"]


def test_labels_for_a_prometheus_that_selects_stand_beside_our_own() -> None:
    labels = {"release": "prometheus", "flowprefill.io/service": "stolen"}
    (monitor,) = of_kind(planned({"observability": {"monitorLabels": labels}}, uid="u-1"), "PodMonitor")
    found = monitor["metadata"]["labels"]
    assert found["release"] == "prometheus"
    assert found["flowprefill.io/service"] == "example"
    assert found["flowprefill.io/owner-uid"] == "u-1"


def test_there_is_no_monitor_where_none_is_wanted() -> None:
    assert not of_kind(planned({"observability": {"podMonitor": False}}), "PodMonitor")


def test_a_route_leads_from_the_named_gateways_to_the_service_for_clients() -> None:
    parents = [
        {"name": "public", "namespace": "gateways", "sectionName": "https", "port": 443},
        {"name": "inner"},
    ]
    changed = {
        "proxy": {
            "portApi": 8080,
            "requestTimeoutSeconds": 900,
            "httpRoute": {"parentRefs": parents, "hostnames": ["llm.example.com", "*.example.com"]},
        }
    }
    objects = planned(changed)
    (route,) = of_kind(objects, "HTTPRoute")
    assert route["spec"]["parentRefs"] == parents
    assert route["spec"]["hostnames"] == ["llm.example.com", "*.example.com"]
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    services = {
        item["metadata"]["name"]: [port["port"] for port in item["spec"]["ports"]]
        for item in of_kind(objects, "Service")
        if item["spec"].get("clusterIP") != "None"
    }
    assert services == {backend["name"]: [backend["port"]]} == {"example-proxy": [8080]}
    assert int(rule["timeouts"]["request"].removesuffix("s")) > 900, (
        "the proxy ends a request before the gateway"
    )


def test_there_is_no_route_unless_it_is_asked_for() -> None:
    assert not of_kind(planned({}), "HTTPRoute")
