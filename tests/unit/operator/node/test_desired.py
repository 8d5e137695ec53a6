"""What the local node takes from planned objects."""

from __future__ import annotations

from typing import Any

from flowprefill_crd import parse_service
from flowprefill_operator.node.desired import Desired, desired
from flowprefill_operator.plan import plan
from flowprefill_operator.settings import PlanSettings
from support.services import document, merged


def of(changed: dict[str, Any] | None = None) -> Desired:
    body = document()
    body["spec"] = merged(body["spec"], changed or {})
    return desired(plan(parse_service(body), PlanSettings()))


def test_each_deployment_is_a_group_with_its_number_of_pods() -> None:
    groups = {group.role: group.replicas for group in of({"decode": {"replicas": 3}}).groups}
    assert groups == {"prefill": 1, "decode": 3, "proxy": 1}


def test_an_autoscaled_role_runs_its_minimum_with_either_provider() -> None:
    for provider in ({}, {"provider": "Keda", "prometheusAddress": "http://p:9090"}):
        scaling = {"minReplicas": 2, "maxReplicas": 4, **provider}
        groups = {g.role: g.replicas for g in of({"prefill": {"autoscaling": scaling}}).groups}
        assert groups["prefill"] == 2


def test_only_the_service_for_clients_is_a_port_here() -> None:
    (port,) = of().services
    assert (port.service, port.port, port.target) == ("example-proxy", 8000, "api")


def test_a_live_change_keeps_every_group_and_a_scale_change_too() -> None:
    keys = [group.key for group in of().groups]
    assert [group.key for group in of({"scheduling": {"policy": "edf"}}).groups] == keys
    assert [group.key for group in of({"prefill": {"replicas": 4}}).groups] == keys
    assert [group.key for group in of({"engine": {"blockSize": 32}}).groups] != keys


def test_recreate_is_for_workers() -> None:
    groups = {g.role: g.recreate for g in of({"rollout": {"strategy": "Recreate"}}).groups}
    assert groups == {"prefill": True, "decode": True, "proxy": False}
