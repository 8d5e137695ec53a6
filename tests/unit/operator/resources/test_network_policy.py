"""Who reaches which port of a pod, as a cluster reads the policies."""

from __future__ import annotations

from typing import Any

import pytest

from flowprefill_crd import parse_service
from flowprefill_operator.plan import plan
from flowprefill_operator.settings import PlanSettings
from support.planned import deployments, of_kind, planned, pod_labels, selects
from support.services import document


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
