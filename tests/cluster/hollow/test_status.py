"""Status tells what is wrong, in the condition where a user looks for it, and that it is over when it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest

from flowprefill_operator.kinds import CONFIG_MAPS, Kind
from support.control_plane.hollow_behaviour import (
    Behaviour,
    ConfigFails,
    CrashLoops,
    Evicted,
    ImagePullFails,
    Initializes,
    MountFails,
    NeverReady,
)
from support.control_plane.operated import Operated, simulated
from support.control_plane.waiting import until

Json = dict[str, Any]

QUOTAS = Kind(kind="ResourceQuota", plural="resourcequotas")
BACK_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What happens to prefill pods, and what PrefillReady says of it. `stalled`: somebody has to do something."""

    behaviour: Behaviour
    reason: str
    says: str
    stalled: bool = True

    def __str__(self) -> str:
        return f"{type(self.behaviour).__name__}-{self.reason}"


TROUBLES = (
    Trouble(
        behaviour=ImagePullFails(message='Back-off pulling image "nowhere.example/x:1"'),
        reason="ImagePullFailed",
        says="nowhere.example/x:1",
    ),
    Trouble(
        behaviour=ImagePullFails(reason="InvalidImageName", message='couldn\'t parse image name "A B"'),
        reason="ImagePullFailed",
        says="A B",
    ),
    Trouble(
        behaviour=CrashLoops(exit_code=3, message="the model has 31 heads, not 30", restarts=4),
        reason="CrashLoop",
        says="the model has 31 heads, not 30",
    ),
    Trouble(behaviour=CrashLoops(exit_code=137, reason="OOMKilled"), reason="CrashLoop", says="OOMKilled"),
    Trouble(
        behaviour=ConfigFails(message='secret "hub-token" not found'),
        reason="SecretMissing",
        says="hub-token",
    ),
    Trouble(
        behaviour=ConfigFails(message="couldn't find key token in Secret case/hub-token"),
        reason="ContainerConfigError",
        says="couldn't find key token",
    ),
    Trouble(behaviour=MountFails(), reason="SecretMissing", says='secret "keys" not found'),
    Trouble(behaviour=NeverReady(), reason="LoadingModel", says="not ready yet", stalled=False),
)


@pytest.mark.parametrize("trouble", TROUBLES, ids=str)
def test_what_keeps_pods_from_being_ready_is_told_and_is_over_when_it_is_over(
    cluster: Operated, namespace: str, trouble: Trouble
) -> None:
    rule = cluster.node.behave(trouble.behaviour, namespace=namespace, role="prefill")
    cluster.apply(namespace, simulated("web"))
    told = cluster.wait_condition(
        namespace, "web", "PrefillReady", "False", reason=trouble.reason, says=trouble.says
    )
    assert "web-prefill-" in told["message"], "the pod is named"
    ready = cluster.wait_condition(namespace, "web", "Ready", "False", reason=trouble.reason)
    assert trouble.says in ready["message"]
    cluster.wait_condition(namespace, "web", "DecodeReady", "True")
    cluster.wait_condition(namespace, "web", "Available", "False")
    shown = cluster.conditions(namespace, "web")
    assert ("Stalled" if trouble.stalled else "Reconciling") in shown
    assert ("Reconciling" if trouble.stalled else "Stalled") not in shown
    cluster.node.forget(rule)
    cluster.wait_ready(namespace, "web", within_s=BACK_S)
    assert not {"Stalled", "Reconciling"} & set(cluster.conditions(namespace, "web"))


def test_a_model_that_is_fetched_is_told_with_the_time_it_began(cluster: Operated, namespace: str) -> None:
    rule = cluster.node.behave(
        Initializes(), namespace=namespace, predicate=lambda pod: "initContainers" in pod["spec"]
    )
    cluster.apply(namespace, simulated("web", model={"uri": "hf://org/model"}))
    cluster.wait_condition(namespace, "web", "PrefillReady", "False", reason="FetchingModel")
    since = cluster.service(namespace, "web")["status"]["loadingSince"]
    created = min(pod["metadata"]["creationTimestamp"] for pod in cluster.pods(namespace, "web"))
    assert datetime.fromisoformat(since) >= datetime.fromisoformat(created)
    cluster.node.forget(rule)
    cluster.wait_ready(namespace, "web")
    assert "loadingSince" not in cluster.service(namespace, "web")["status"]


def test_a_pod_without_a_node_is_told(cluster: Operated, namespace: str) -> None:
    nowhere = {"podTemplate": {"spec": {"nodeSelector": {"zone": "nowhere"}}}}
    cluster.apply(namespace, simulated("web", decode=nowhere))
    told = cluster.wait_condition(namespace, "web", "DecodeReady", "False", reason="Unschedulable")
    assert "node affinity/selector" in told["message"]
    cluster.change(namespace, "web", {"decode": {"podTemplate": None}})
    cluster.wait_ready(namespace, "web")


def test_readiness_that_is_lost_again_is_told_and_comes_back(cluster: Operated, namespace: str) -> None:
    cluster.apply(namespace, simulated("web"))
    cluster.wait_ready(namespace, "web")
    rule = cluster.node.behave(NeverReady(), namespace=namespace, role="decode")
    cluster.wait_condition(namespace, "web", "DecodeReady", "False")
    cluster.wait_condition(namespace, "web", "Available", "False")
    cluster.wait_condition(namespace, "web", "Ready", "False")
    assert cluster.service(namespace, "web")["status"]["roles"]["decode"]["summary"] == "0/1"
    cluster.node.forget(rule)
    cluster.wait_ready(namespace, "web")
    cluster.wait_condition(namespace, "web", "Available", "True")


def test_a_service_is_not_ready_before_a_token_has_gone_through(cluster: Operated, namespace: str) -> None:
    cluster.node.admin.failing_round_trips[namespace, "web"] = "the KV transfer timed out"
    try:
        cluster.apply(namespace, simulated("web"))
        cluster.wait_condition(
            namespace, "web", "Ready", "False", reason="RoundTripFailed", says="the KV transfer timed out"
        )
        for role in ("PrefillReady", "DecodeReady", "ProxyReady"):
            cluster.wait_condition(namespace, "web", role, "True")
        cluster.wait_condition(namespace, "web", "Available", "False")
    finally:
        cluster.node.admin.failing_round_trips.clear()
    cluster.wait_ready(namespace, "web")


def test_an_evicted_pod_is_replaced(cluster: Operated, namespace: str) -> None:
    cluster.apply(namespace, simulated("web"))
    cluster.wait_ready(namespace, "web")
    (pod,) = cluster.pods(namespace, "web", "prefill")
    name = pod["metadata"]["name"]
    cluster.node.behave(Evicted(), namespace=namespace, predicate=lambda p: p["metadata"]["name"] == name)

    def fresh() -> bool:
        phases = {
            p["metadata"]["name"]: p["status"].get("phase") for p in cluster.pods(namespace, "web", "prefill")
        }
        return phases.get(name) == "Failed" and "Running" in phases.values()

    until(fresh, "another prefill pod")
    cluster.wait_ready(namespace, "web")


def test_a_quota_that_is_full_is_told(cluster: Operated, namespace: str) -> None:
    quota = {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "2"}}}
    cluster.create(QUOTAS, namespace, quota)
    until(
        lambda: (cluster.get(QUOTAS, namespace, "small") or {}).get("status", {}).get("hard"),
        "the quota counts",
    )
    cluster.apply(namespace, simulated("web"))
    told = cluster.wait_condition(namespace, "web", "Ready", "False", reason="QuotaExceeded")
    assert "exceeded quota: small" in told["message"]
    cluster.delete(QUOTAS, namespace, "small")
    # The ReplicaSet controller tries a refused pod again after a growing pause.
    cluster.wait_ready(namespace, "web", within_s=120.0)


def test_pods_that_the_namespace_does_not_admit_are_told(cluster: Operated, namespace: str) -> None:
    cluster.plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    cluster.apply(namespace, simulated("web", decode={"podTemplate": {"spec": {"hostNetwork": True}}}))
    told = cluster.wait_condition(namespace, "web", "DecodeReady", "False", reason="PodSecurityViolation")
    assert "hostNetwork" in told["message"] or "host namespaces" in told["message"]
    cluster.wait_condition(namespace, "web", "PrefillReady", "True")
    cluster.change(namespace, "web", {"decode": {"podTemplate": None}})
    cluster.wait_ready(namespace, "web")


@pytest.mark.parametrize(
    ("spec", "reason", "says"),
    [
        ({"prefill": {"nodes": 2}}, "MultiNodeUnsupported", "spec.prefill.nodes"),
        (
            {"prefill": {"podTemplate": {"spec": {"terminationGracePeriodSeconds": "soon"}}}},
            "InvalidPodTemplate",
            "terminationGracePeriodSeconds",
        ),
        (
            {"decode": {"podTemplate": {"spec": {"volumes": [{"name": "Not_A_Name", "emptyDir": {}}]}}}},
            "InvalidPodTemplate",
            "Not_A_Name",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value[0].isupper() else "",
)
def test_a_spec_that_is_not_acted_on_says_so_and_makes_nothing(
    cluster: Operated, namespace: str, spec: Json, reason: str, says: str
) -> None:
    created = cluster.apply(namespace, simulated("web", **spec))
    told = cluster.wait_condition(namespace, "web", "Accepted", "False", reason=reason)
    assert says in told["message"]
    cluster.wait_condition(namespace, "web", "Ready", "False", reason=reason)
    assert "Stalled" in cluster.conditions(namespace, "web")
    assert cluster.owned(namespace, created["metadata"]["uid"]) == {}
    cluster.change(namespace, "web", dict.fromkeys(spec))
    cluster.wait_ready(namespace, "web")


def test_a_bad_change_leaves_what_runs_as_it_is(cluster: Operated, namespace: str) -> None:
    cluster.apply(namespace, simulated("web"))
    cluster.wait_ready(namespace, "web")
    before = {p["metadata"]["uid"] for p in cluster.pods(namespace, "web")}
    cluster.change(namespace, "web", {"prefill": {"nodes": 4}})
    cluster.wait_condition(namespace, "web", "Accepted", "False", reason="MultiNodeUnsupported")
    cluster.wait_condition(namespace, "web", "Available", "True")
    assert {p["metadata"]["uid"] for p in cluster.pods(namespace, "web")} == before


@pytest.fixture
def attainment(cluster: Operated, namespace: str) -> Iterator[None]:
    windows = {"5m": {"met": 0, "missed": 0}, "1h": {"met": 1997, "missed": 3}}
    nothing = {"5m": {"met": 0, "missed": 0}, "1h": {"met": 0, "missed": 0}}
    cluster.node.admin.attainment[namespace, "web"] = {
        "chat": {"met": 1997, "missed": 3, "windows": windows},
        "document": {"met": 0, "missed": 0, "windows": nothing},
    }
    yield
    cluster.node.admin.attainment.clear()


@pytest.mark.usefixtures("attainment")
def test_attainment_of_all_proxies_is_told_to_a_tenth_of_a_percent_and_absent_without_requests(
    cluster: Operated, namespace: str
) -> None:
    cluster.apply(namespace, simulated("web", proxy={"replicas": 2}))
    cluster.wait_ready(namespace, "web")

    def told() -> dict[str, str | None]:
        entries = cluster.service(namespace, "web")["status"].get("sloAttainment", ())
        return {entry["name"]: entry.get("attainment") for entry in entries}

    # 2 x 1997 of 2 x 2000 requests met: 99.85 %, which half-even decimal rounding of the binary value makes 99.8 or 99.9.
    found = until(lambda: told() if told().get("chat") else None, "attainment of chat", within_s=90.0)
    assert found["chat"] in {"99.8", "99.9"}
    assert found["document"] is None


def test_a_lost_object_of_the_service_is_not_told_as_ready(cluster: Operated, namespace: str) -> None:
    """The live document is gone while the operator may not write: Ready is not claimed."""
    cluster.apply(namespace, simulated("web"))
    cluster.wait_ready(namespace, "web")
    refusal = cluster.faulty.refuse(403, verb="patch", resource="configmaps")
    cluster.delete(CONFIG_MAPS, namespace, "web-live")
    cluster.wait_condition(namespace, "web", "ObjectsApplied", "False", reason="Forbidden", says="configmaps")
    cluster.wait_condition(namespace, "web", "Ready", "False", reason="Forbidden")
    cluster.faulty.heal(refusal)
    cluster.wait_ready(namespace, "web")
