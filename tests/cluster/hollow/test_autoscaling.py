"""Scaling by a real HorizontalPodAutoscaler on CPU use, and how the number of pods passes to it and back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from flowprefill_operator.kinds import DEPLOYMENTS
from support.control_plane.metrics_api import MetricsApi
from support.control_plane.operated import Operated, simulated
from support.control_plane.plane import ControlPlane
from support.control_plane.waiting import until

Json = dict[str, Any]

SCALED_S = 90.0
PREFILL = {"resources": {"requests": {"cpu": "1"}}}


@pytest.fixture(scope="module")
def metrics(plane: ControlPlane) -> Iterator[MetricsApi]:
    with MetricsApi(plane) as metrics:
        yield metrics


def scaling(least: int, most: int) -> Json:
    bounds = {"minReplicas": least, "maxReplicas": most}
    return bounds | {"targetUtilizationPercent": 50, "scaleDownStabilizationSeconds": 2}


def replicas(cluster: Operated, namespace: str) -> list[int]:
    found = cluster.list(DEPLOYMENTS, namespace, **{"flowprefill.io/role": "prefill"})
    return [item["spec"]["replicas"] for item in found]


class LowestSeen:
    """The smallest number of pods that a namespace's prefill Deployments asked for while this was watched."""

    def __init__(self, cluster: Operated, namespace: str) -> None:
        self.lowest = 10_000
        self._look = lambda: replicas(cluster, namespace)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> LowestSeen:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.is_set():
            self.lowest = min([self.lowest, *self._look()])
            self._end.wait(0.02)


def test_pods_follow_the_use_of_cpu(cluster: Operated, namespace: str, metrics: MetricsApi) -> None:
    metrics.cpu_millicores = lambda pod: 500
    cluster.apply(namespace, simulated("web", prefill=PREFILL | {"autoscaling": scaling(2, 6)}))
    cluster.wait_ready(namespace, "web")
    assert replicas(cluster, namespace) == [2]
    # Twice the wanted use: 2 pods become 4, which then would still use 1 core each: 8, of which 6 are allowed.
    metrics.cpu_millicores = lambda pod: 1000
    until(lambda: replicas(cluster, namespace) == [6], "6 prefill pods", within_s=SCALED_S)
    until(
        lambda: cluster.service(namespace, "web")["status"]["roles"]["prefill"]["summary"] == "6/6",
        "the status tells 6 of 6",
    )
    metrics.cpu_millicores = lambda pod: 100
    until(lambda: replicas(cluster, namespace) == [2], "2 prefill pods again", within_s=SCALED_S)


def test_the_operator_writes_nothing_while_the_autoscaler_scales(
    cluster: Operated, namespace: str, metrics: MetricsApi
) -> None:
    metrics.cpu_millicores = lambda pod: 500
    cluster.apply(namespace, simulated("web", prefill=PREFILL | {"autoscaling": scaling(1, 4)}))
    cluster.wait_ready(namespace, "web")
    before = len(cluster.faulty.calls.writes())
    metrics.cpu_millicores = lambda pod: 2000
    until(lambda: replicas(cluster, namespace) == [4], "4 prefill pods", within_s=SCALED_S)
    cluster.wait_ready(namespace, "web")
    written = {call.resource for call in cluster.faulty.calls.writes()[before:]}
    assert written <= {"flowprefillservices.flowprefill.io/status"}


def test_three_pods_never_become_fewer_while_their_number_passes_to_an_autoscaler(
    cluster: Operated, namespace: str, metrics: MetricsApi
) -> None:
    metrics.cpu_millicores = lambda pod: 500
    cluster.apply(namespace, simulated("web", prefill=PREFILL | {"replicas": 3}))
    cluster.wait_ready(namespace, "web")
    before = {pod["metadata"]["uid"] for pod in cluster.pods(namespace, "web", "prefill")}
    with LowestSeen(cluster, namespace) as seen:
        cluster.change(namespace, "web", {"prefill": {"replicas": None, "autoscaling": scaling(1, 8)}})
        cluster.wait_ready(namespace, "web")
        looks = metrics.requests
        # Three looks of the autoscaler at 50 % use of a wanted 50 %: it has taken over and keeps what is there.
        until(lambda: metrics.requests > looks + 3, "the autoscaler looks", within_s=SCALED_S)
    assert seen.lowest == 3
    assert {pod["metadata"]["uid"] for pod in cluster.pods(namespace, "web", "prefill")} == before


def test_a_number_in_the_spec_takes_over_from_an_autoscaler(
    cluster: Operated, namespace: str, metrics: MetricsApi
) -> None:
    metrics.cpu_millicores = lambda pod: 500
    cluster.apply(namespace, simulated("web", prefill=PREFILL | {"autoscaling": scaling(3, 8)}))
    cluster.wait_ready(namespace, "web")
    with LowestSeen(cluster, namespace) as seen:
        cluster.change(namespace, "web", {"prefill": {"replicas": 5, "autoscaling": None}})
        until(lambda: replicas(cluster, namespace) == [5], "5 prefill pods", within_s=SCALED_S)
        cluster.wait_ready(namespace, "web")
    assert seen.lowest == 3
    uid = cluster.service(namespace, "web")["metadata"]["uid"]
    assert "HorizontalPodAutoscaler" not in {kind for kind, _ in cluster.owned(namespace, uid)}


def test_a_new_revision_starts_with_as_many_pods_as_the_old_one_has(
    cluster: Operated, namespace: str, metrics: MetricsApi
) -> None:
    metrics.cpu_millicores = lambda pod: 1000
    cluster.apply(namespace, simulated("web", prefill=PREFILL | {"autoscaling": scaling(1, 4)}))
    until(lambda: replicas(cluster, namespace) == [4], "4 prefill pods", within_s=SCALED_S)
    cluster.wait_ready(namespace, "web")
    metrics.cpu_millicores = lambda pod: 500
    with LowestSeen(cluster, namespace) as seen:
        cluster.change(namespace, "web", {"engine": {"blockSize": 32}})
        cluster.wait_ready(namespace, "web")
        until(lambda: replicas(cluster, namespace) == [4], "the new revision alone", within_s=SCALED_S)
    assert seen.lowest == 4
