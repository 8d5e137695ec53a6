"""Conditions in every situation, read as `kubectl wait` and kstatus read them."""

from __future__ import annotations

import pytest

from flowprefill_operator.apply import Applied
from flowprefill_operator.controller.events import is_good, transitions
from flowprefill_operator.status.compute import status_of
from flowprefill_operator.status.view import Reports
from support.cluster_objects import (
    pod_status,
    running,
    waiting,
)
from support.conditions import NOW, OTHER, conditions, prefill_pod, serving, starting, told, view
from support.services import Spec, merged
from support.simulated_cluster import SimulatedCluster


def test_a_service_that_serves_has_every_condition_of_its_parts_and_no_other() -> None:
    cluster, _ = serving()
    found = conditions(view(cluster))
    assert list(found) == [
        "Ready",
        "Accepted",
        "ObjectsApplied",
        "PrefillReady",
        "DecodeReady",
        "ProxyReady",
        "RolloutComplete",
        "ConfigApplied",
        "Available",
    ]
    assert {c.status for c in found.values()} == {"True"}
    assert told(view(cluster)) == ("True", "Serving", "Current")


def test_a_colocated_service_has_no_condition_about_decode_pods() -> None:
    cluster, _ = serving({"mode": "Colocated"})
    found = conditions(view(cluster))
    assert "DecodeReady" not in found
    assert found["PrefillReady"].status == "True"
    assert told(view(cluster)) == ("True", "Serving", "Current")


def test_a_service_that_asks_for_a_profiling_job_has_a_condition_about_it() -> None:
    cluster = SimulatedCluster(1)
    cluster.healthy = False
    cluster.ask({"scheduling": {"predictor": {"profilingJob": True}}})
    cluster.settle()
    assert told(view(cluster), "ProfileReady") == ("False", "Profiling", "InProgress")
    waits = conditions(view(cluster))["PrefillReady"]
    assert (waits.reason, waits.message) == ("PodsStarting", "waits for the profiling Job")
    (job,) = [item for (kind, _), item in cluster.objects.items() if kind.kind == "Job"]
    job["status"] = {
        "conditions": [
            {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "3 tries"}
        ]
    }
    job["metadata"]["resourceVersion"] = "9999"
    assert told(view(cluster), "ProfileReady") == ("False", "ProfilingFailed", "Failed")
    assert "BackoffLimitExceeded: 3 tries" in conditions(view(cluster))["Ready"].message
    del job["status"]
    cluster.healthy = True
    cluster.settle()
    assert told(view(cluster), "ProfileReady") == ("True", "Profiled", "Current")


def test_a_kind_that_may_not_be_watched_is_told_with_what_to_grant() -> None:
    cluster, _ = serving()
    shown = view(cluster, forbidden=(("watch", "deployments.apps"), ("list", "pods")))
    assert told(shown) == ("False", "Forbidden", "Failed")
    assert "may not watch deployments.apps" in conditions(shown)["ObjectsApplied"].message


def test_a_crd_of_another_release_is_told_beside_what_is_true_of_the_pods() -> None:
    cluster, _ = serving()
    shown = view(cluster, schema_outdated=True)
    assert told(shown, "SchemaCurrent") == ("False", "CRDOutdated", "Current")
    # A rollout that makes progress is not stalled by it.
    cluster, revision = starting()
    prefill_pod(cluster, revision, pod_status(running(), phase="Running"))
    assert told(view(cluster, schema_outdated=True)) == ("False", "LoadingModel", "InProgress")


def test_a_spec_that_is_not_acted_on_is_not_accepted_and_what_serves_stays_available() -> None:
    cluster, _ = serving()
    shown = view(
        cluster, goal=None, applied=None, refusal=("MultiNodeUnsupported", "spec.prefill.nodes is 2")
    )
    assert told(shown, "Accepted") == ("False", "MultiNodeUnsupported", "Failed")
    assert told(shown) == ("False", "MultiNodeUnsupported", "Failed")
    assert conditions(shown)["Available"].status == "True"
    assert "ObjectsApplied" not in conditions(shown)


def test_a_paused_service_tells_so_and_what_its_pods_do() -> None:
    cluster, _revision = serving()
    cluster.ask({"paused": True})
    shown = view(cluster, applied=None)
    assert told(shown, "ObjectsApplied")[:2] == ("Unknown", "Paused")
    assert told(shown)[:2] == ("Unknown", "Paused")
    assert {"Reconciling", "Stalled"}.isdisjoint(conditions(shown))
    assert conditions(shown)["Available"].status == "True"
    assert conditions(shown)["PrefillReady"].status == "True"


def test_a_change_that_waits_for_the_end_of_a_pause_is_told_as_such() -> None:
    cluster, old = serving()
    new = cluster.ask({**OTHER, "paused": True})
    shown = view(cluster, applied=None)
    assert told(shown)[:2] == ("Unknown", "Paused")
    assert "once spec.paused" in conditions(shown)["Accepted"].message
    assert told(shown, "RolloutComplete")[:2] == ("False", "Paused")
    assert {old, new} <= set(conditions(shown)["RolloutComplete"].message.split())
    assert told(shown, "PrefillReady")[:2] == ("True", "PodsReady")
    assert {"Reconciling", "Stalled"}.isdisjoint(conditions(shown))


def test_a_rollout_is_told_with_both_revisions_and_the_old_one_stays_available() -> None:
    cluster, old = serving()
    new = cluster.ask(OTHER)
    cluster.sick.add(new)
    cluster.settle()
    shown = view(cluster)
    assert told(shown, "RolloutComplete") == ("False", "RollingOut", "InProgress")
    assert {old, new} <= set(conditions(shown)["RolloutComplete"].message.split())
    assert conditions(shown)["Available"].status == "True"
    deployment = cluster.deployment("prefill", new)
    assert deployment is not None
    deployment["status"]["conditions"] = [
        {
            "type": "Progressing",
            "status": "False",
            "reason": "ProgressDeadlineExceeded",
            "message": f'ReplicaSet "example-prefill-{new}-x" has timed out progressing.',
        }
    ]
    shown = view(cluster)
    assert told(shown, "RolloutComplete") == ("False", "RolloutStuck", "Failed")
    assert f"revision {old} keeps serving" in conditions(shown)["RolloutComplete"].message
    assert conditions(shown)["Available"].status == "True"
    assert conditions(shown)["Stalled"].status == "True"


def test_a_new_revision_that_serves_no_token_does_not_make_a_service_available_that_never_served() -> None:
    cluster, _ = starting()
    new = cluster.ask(OTHER)
    cluster.mute.add(new)
    cluster.settle()
    assert cluster.serves(new)
    assert told(view(cluster), "Available")[:2] == ("False", "RoundTripPending")


def test_a_round_trip_that_fails_is_told_with_its_reason() -> None:
    cluster = SimulatedCluster(1)
    cluster.mute.add(cluster.ask())
    cluster.settle()
    generations = dict.fromkeys(cluster.pods, 1)
    assert told(view(cluster), "RolloutComplete") == ("False", "RoundTripPending", "InProgress")
    shown = view(cluster, reports=Reports(unproven="decode pod answered 500", generations=generations))
    assert told(shown) == ("False", "RoundTripFailed", "InProgress")
    assert "decode pod answered 500" in conditions(shown)["Ready"].message
    assert told(shown, "Available")[:2] == ("False", "RoundTripPending")


def test_a_role_without_pods_is_as_asked_and_nothing_is_served() -> None:
    cluster, _ = serving({"decode": {"replicas": 0}})
    assert told(view(cluster), "DecodeReady")[:2] == ("True", "ScaledToZero")
    shown = view(cluster)
    assert told(shown)[:2] == ("False", "ScaledToZero")
    assert {"Reconciling", "Stalled"}.isdisjoint(conditions(shown))
    assert told(shown, "Available")[:2] == ("False", "ScaledToZero")
    told_of = transitions(status_of(view(serving()[0])), status_of(shown))
    assert {change.type: is_good(change) for change in told_of} == {"Ready": True, "Available": True}


def test_without_the_proxies_service_nothing_is_available() -> None:
    cluster, _ = serving()
    assert told(view(cluster), "Available")[0] == "True"
    (service,) = [key for key in cluster.objects if key[0].kind == "Service" and key[1] == "example-proxy"]
    cluster.lose(service)
    assert told(view(cluster), "Available")[:2] == ("False", "NoProxy")


def test_without_a_ready_proxy_nothing_is_available() -> None:
    cluster, _ = serving()
    cluster.restart("proxy", cluster.goal().target.name)
    assert told(view(cluster), "Available")[:2] == ("False", "NoProxy")


def test_a_live_configuration_that_pods_do_not_follow_yet_is_told_with_their_names() -> None:
    cluster, _ = serving()
    ready = sorted(cluster.pods)
    shown = view(cluster, reports=Reports(generations=dict.fromkeys(ready[1:], 1)))
    assert told(shown, "ConfigApplied") == ("False", "Pending", "InProgress")
    assert ready[0] in conditions(shown)["ConfigApplied"].message
    assert told(shown) == ("False", "Pending", "InProgress")
    behind = dict.fromkeys(ready, 1) | {ready[0]: 0}
    assert told(view(cluster, reports=Reports(generations=behind)), "ConfigApplied")[0] == "False"


def test_a_live_configuration_that_no_worker_is_there_to_follow_is_not_in_use() -> None:
    cluster, _ = serving()
    revision = cluster.goal().target.name
    for role in ("prefill", "decode"):
        cluster.restart(role, revision)
    proxies = Reports(generations=dict.fromkeys(cluster.pods, 1))
    assert told(view(cluster, reports=proxies), "ConfigApplied")[:2] == ("False", "Pending")


def test_pods_that_stop_need_not_follow_the_live_configuration() -> None:
    cluster, _ = serving()
    name = sorted(cluster.pods)[0]
    cluster.pods[name]["metadata"]["deletionTimestamp"] = NOW
    others = {other: 1 for other in cluster.pods if other != name}
    assert told(view(cluster, reports=Reports(generations=others)), "ConfigApplied")[0] == "True"


@pytest.mark.parametrize(
    ("changes", "condition"),
    [
        (
            {
                "prefill": {
                    "autoscaling": {
                        "maxReplicas": 2,
                        "provider": "Keda",
                        "prometheusAddress": "http://p:9090",
                    }
                }
            },
            "AutoscalingReady",
        ),
        ({"proxy": {"httpRoute": {"parentRefs": [{"name": "public"}]}}}, "RouteReady"),
    ],
)
def test_an_object_whose_api_is_not_there_has_a_condition_and_one_that_is_there_has_none(
    changes: Spec, condition: str
) -> None:
    cluster, _ = serving(merged({}, changes))
    items = [item for step in cluster.goal().steps for item in step]
    absent = tuple(item for item in items if item["kind"] in ("ScaledObject", "HTTPRoute"))
    assert condition not in conditions(view(cluster))
    shown = view(cluster, applied=Applied(writes=0, failures=(), absent=absent))
    assert told(shown, condition)[:2] == ("False", "CRDNotInstalled")
    assert told(shown, "ObjectsApplied")[:2] == ("False", "CRDNotInstalled")
    assert told(shown) == ("False", "CRDNotInstalled", "Failed")
    assert told(shown, "Available")[0] == "True"


def test_ready_tells_what_needs_somebody_before_what_takes_its_time() -> None:
    """Objects come before pods, but an image that cannot be pulled is why nothing will happen."""
    cluster, revision = starting()
    prefill_pod(cluster, revision, pod_status(running(), phase="Running"))
    decode = cluster.members("decode", revision)[0]
    decode["status"] = pod_status(waiting("ImagePullBackOff", "denied"))
    shown = view(cluster)
    assert told(shown) == ("False", "ImagePullFailed", "Failed")
    assert conditions(shown)["Ready"].message.startswith("DecodeReady: ")
    assert conditions(shown)["Stalled"].reason == "ImagePullFailed"
    assert "Reconciling" not in conditions(shown)
