"""What somebody does to the operator's objects is mended within 10 seconds, whichever kind it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from flowprefill_operator.kinds import OWNED, Kind
from support.control_plane.operated import Operated, seconds_until, simulated

Json = dict[str, Any]

MENDED_S = 10.0
NAMESPACE = "drift"


def kind(name: str) -> Kind:
    return next(found for found in OWNED if found.kind == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A change that somebody makes to an object of a kind (named by a part of its name), and where it shows."""

    kind: str
    part: str
    change: Json
    field: Callable[[Json], object]

    def __str__(self) -> str:
        return f"{self.kind}-{self.part.strip('-')}"


DAMAGES = (
    Damage(
        kind="ConfigMap",
        part="-live",
        change={"data": {"live.json": "{}"}},
        field=lambda o: o["data"]["live.json"],
    ),
    Damage(
        kind="Deployment",
        part="-prefill-",
        change={"spec": {"replicas": 3}},
        field=lambda o: o["spec"]["replicas"],
    ),
    Damage(
        kind="Deployment",
        part="-decode-",
        change={"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 7}}}},
        field=lambda o: o["spec"]["template"]["spec"]["terminationGracePeriodSeconds"],
    ),
    Damage(
        kind="Deployment",
        part="-proxy",
        change={"metadata": {"labels": {"flowprefill.io/role": "decode"}}},
        field=lambda o: o["metadata"]["labels"]["flowprefill.io/role"],
    ),
    Damage(
        kind="Service",
        part="-proxy",
        change={"spec": {"selector": {"flowprefill.io/role": "nobody"}}},
        field=lambda o: o["spec"]["selector"],
    ),
    Damage(
        kind="Service",
        part="-prefill-",
        change={"metadata": {"labels": {"flowprefill.io/revision": "other"}}},
        field=lambda o: o["metadata"]["labels"]["flowprefill.io/revision"],
    ),
    Damage(
        kind="Role",
        part="-proxy",
        change={"rules": []},
        field=lambda o: o.get("rules"),
    ),
    Damage(
        kind="RoleBinding",
        part="-proxy",
        change={"subjects": []},
        field=lambda o: o.get("subjects"),
    ),
    Damage(
        kind="NetworkPolicy",
        part="-workers",
        change={"spec": {"ingress": [{}]}},
        field=lambda o: o["spec"]["ingress"],
    ),
    Damage(
        kind="PodDisruptionBudget",
        part="-prefill",
        change={"spec": {"maxUnavailable": 5}},
        field=lambda o: o["spec"]["maxUnavailable"],
    ),
    Damage(
        kind="HorizontalPodAutoscaler",
        part="-decode",
        change={"spec": {"maxReplicas": 99}},
        field=lambda o: o["spec"]["maxReplicas"],
    ),
    Damage(
        kind="PersistentVolumeClaim",
        part="-model-cache",
        change={"metadata": {"labels": {"app.kubernetes.io/part-of": "other"}}},
        field=lambda o: o["metadata"]["labels"]["app.kubernetes.io/part-of"],
    ),
)
"""The ConfigMap of a revision and a ControllerRevision cannot be changed: the API server forbids it."""

DELETED = (
    "ConfigMap",
    "ControllerRevision",
    "Deployment",
    "Service",
    "ServiceAccount",
    "Role",
    "RoleBinding",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "HorizontalPodAutoscaler",
)


@pytest.fixture(scope="module")
def drifting(cluster: Operated) -> Iterator[Operated]:
    """A service that has an object of every kind that needs no other project's CRD."""
    cluster.plane.kubectl("create", "namespace", NAMESPACE)
    scaling = {"minReplicas": 2, "maxReplicas": 4, "targetUtilizationPercent": 80}
    cluster.apply(
        NAMESPACE,
        simulated(
            "web",
            model={
                "uri": "hf://org/model",
                "cache": {"persistentVolumeClaim": {"storage": "1Gi", "accessModes": ["ReadWriteMany"]}},
            },
            prefill={"replicas": 2},
            decode={"autoscaling": scaling, "resources": {"requests": {"cpu": "1"}}},
        ),
    )
    cluster.wait_ready(NAMESPACE, "web")
    yield cluster
    cluster.plane.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def owned_of(cluster: Operated, kind_name: str) -> list[Json]:
    uid = cluster.service(NAMESPACE, "web")["metadata"]["uid"]
    return [item for (found, _), item in cluster.owned(NAMESPACE, uid).items() if found == kind_name]


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_a_changed_object_is_mended(drifting: Operated, damage: Damage) -> None:
    target = next(o for o in owned_of(drifting, damage.kind) if damage.part in o["metadata"]["name"])
    name, before = target["metadata"]["name"], damage.field(target)
    drifting.edit(kind(damage.kind), NAMESPACE, name, damage.change)

    def mended() -> bool:
        found = drifting.get(kind(damage.kind), NAMESPACE, name)
        return found is not None and damage.field(found) == before

    seconds_until(mended, f"{damage} is as it was", within_s=MENDED_S)


@pytest.mark.parametrize("kind_name", DELETED)
def test_a_deleted_object_is_made_again(drifting: Operated, kind_name: str) -> None:
    targets = owned_of(drifting, kind_name)
    assert targets, f"the service owns a {kind_name}"
    for target in targets:
        drifting.delete(kind(kind_name), NAMESPACE, target["metadata"]["name"])
    gone = {target["metadata"]["uid"] for target in targets}
    names = {target["metadata"]["name"] for target in targets}

    def made_again() -> bool:
        found = {o["metadata"]["name"]: o["metadata"]["uid"] for o in owned_of(drifting, kind_name)}
        return names <= set(found) and not gone & set(found.values())

    seconds_until(made_again, f"every {kind_name} is there again", within_s=MENDED_S)
    drifting.wait_ready(NAMESPACE, "web")


def test_what_others_add_is_left_alone(drifting: Operated) -> None:
    """Fields that the operator does not set belong to whoever sets them."""
    target = next(o for o in owned_of(drifting, "Service") if "-proxy" in o["metadata"]["name"])
    name = target["metadata"]["name"]
    drifting.edit(
        kind("Service"), NAMESPACE, name, {"metadata": {"annotations": {"mesh.example/port": "80"}}}
    )
    live = next(o for o in owned_of(drifting, "ConfigMap") if o["metadata"]["name"].endswith("-live"))
    text = live["data"]["live.json"]
    drifting.edit(kind("ConfigMap"), NAMESPACE, "web-live", {"data": {"live.json": "{}"}})

    def mended() -> bool:
        found = drifting.get(kind("ConfigMap"), NAMESPACE, "web-live")
        return found is not None and found["data"]["live.json"] == text

    seconds_until(mended, "the operator has looked at the service", within_s=MENDED_S)
    found = drifting.get(kind("Service"), NAMESPACE, name)
    assert found is not None
    assert found["metadata"]["annotations"]["mesh.example/port"] == "80"


def test_a_service_without_drift_is_not_written_to(drifting: Operated) -> None:
    """After everything above: when all is as planned, nothing is written."""
    drifting.wait_ready(NAMESPACE, "web")
    writes = len(drifting.faulty.calls.writes())
    drifting.edit(
        kind("ServiceAccount"), NAMESPACE, "web-proxy", {"metadata": {"annotations": {"looked-at": "1"}}}
    )
    passes = _passes(drifting)
    seconds_until(lambda: _passes(drifting) > passes, "one more pass", within_s=MENDED_S)
    assert len(drifting.faulty.calls.writes()) == writes


def _passes(cluster: Operated) -> float:
    lines = cluster.operator.metrics().splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("flowprefill_operator_reconcile") and "_total{" in line
    )
