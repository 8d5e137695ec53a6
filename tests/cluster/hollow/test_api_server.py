"""The operator through an API server that fails: it comes back by itself, and what runs runs on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowprefill_operator.kinds import CONFIG_MAPS, DEPLOYMENTS
from support.control_plane.operated import Operated, seconds_until, simulated
from support.control_plane.waiting import until

Json = dict[str, Any]

SILENT_S = 90.0
"""The promise for a watch that was silently cut."""


def live(cluster: Operated, namespace: str) -> Json:
    """The live document but for its generation, which a change of the number of pods may or may not move."""
    found = cluster.get(CONFIG_MAPS, namespace, "web-live")
    body: Json = {} if found is None else json.loads(found["data"]["live.json"])
    body.pop("generation", None)
    return body


def test_drift_behind_a_watch_that_was_silently_cut_is_mended(cluster: Operated, namespace: str) -> None:
    cluster.apply(namespace, simulated("web"))
    cluster.wait_ready(namespace, "web")
    before = live(cluster, namespace)
    assert cluster.faulty.silence_watches() > 0
    cluster.edit(CONFIG_MAPS, namespace, "web-live", {"data": {"live.json": "{}"}})
    (deployment,) = cluster.list(DEPLOYMENTS, namespace, **{"flowprefill.io/role": "decode"})
    cluster.delete(DEPLOYMENTS, namespace, deployment["metadata"]["name"])
    cluster.change(namespace, "web", {"prefill": {"replicas": 2}})

    def mended() -> bool:
        made = cluster.list(DEPLOYMENTS, namespace, **{"flowprefill.io/role": "decode"})
        return live(cluster, namespace) == before and bool(made)

    seconds_until(mended, "both are as they were", within_s=SILENT_S)
    until(lambda: len(cluster.pods(namespace, "web", "prefill")) == 2, "2 prefill pods", within_s=SILENT_S)
    cluster.wait_ready(namespace, "web", within_s=SILENT_S)


def test_an_api_server_that_goes_and_comes_back_changes_nothing(cluster: Operated, namespace: str) -> None:
    cluster.apply(namespace, simulated("web"))
    cluster.wait_ready(namespace, "web")
    pods = {pod["metadata"]["uid"] for pod in cluster.pods(namespace, "web")}
    cluster.faulty.go_down()
    try:
        # Past every time-out of the operator's requests (20 s) and of a pass that waits to try again.
        (deployment,) = cluster.list(DEPLOYMENTS, namespace, **{"flowprefill.io/role": "decode"})
        cluster.change(namespace, "web", {"decode": {"replicas": 2}})
        until(
            lambda: (
                sum(
                    "refused" in json.dumps(line) or "Cannot connect" in json.dumps(line)
                    for line in cluster.operator.lines()
                )
                > 0
            ),
            "the operator has noticed",
        )
        assert cluster.operator.running
        assert {pod["metadata"]["uid"] for pod in cluster.pods(namespace, "web")} == pods
        assert cluster.get(DEPLOYMENTS, namespace, deployment["metadata"]["name"]) is not None
    finally:
        cluster.faulty.come_back()
    until(lambda: len(cluster.pods(namespace, "web", "decode")) == 2, "2 decode pods", within_s=SILENT_S)
    cluster.wait_ready(namespace, "web", within_s=SILENT_S)
    assert pods <= {pod["metadata"]["uid"] for pod in cluster.pods(namespace, "web")}


@pytest.mark.parametrize("status", [429, 500, 503])
def test_writes_that_fail_for_a_while_are_made_good(cluster: Operated, namespace: str, status: int) -> None:
    refusal = cluster.faulty.refuse(status, verb="patch", resource="deployments.apps")
    cluster.apply(namespace, simulated("web"))
    told = cluster.wait_condition(namespace, "web", "ObjectsApplied", "False")
    assert "Deployment" in told["message"]
    assert "Stalled" not in cluster.conditions(namespace, "web"), "it is tried again without anybody"
    cluster.faulty.heal(refusal)
    cluster.wait_ready(namespace, "web")


def test_a_status_that_cannot_be_written_is_written_later(cluster: Operated, namespace: str) -> None:
    refusal = cluster.faulty.refuse(500, verb="patch", resource="flowprefillservices.flowprefill.io/status")
    cluster.apply(namespace, simulated("web"))
    until(lambda: len(cluster.pods(namespace, "web")) == 3, "3 pods")
    cluster.faulty.heal(refusal)
    cluster.wait_ready(namespace, "web")


def test_events_that_are_refused_stop_nothing(cluster: Operated, namespace: str) -> None:
    cluster.faulty.refuse(403, verb="create", resource="events.events.k8s.io")
    cluster.apply(namespace, simulated("web"))
    cluster.wait_ready(namespace, "web")
