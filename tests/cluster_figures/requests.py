"""Requests that fail while something in the cluster changes, on a real node with the real model."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from cluster_figures.stage import have
from flowprefill.bench.figures.row import Bench, Figure, Row
from flowprefill_crd.samples import sample_path
from support.control_plane.images import image
from support.control_plane.images_released import TAG, released_operator
from support.control_plane.node import Node
from support.control_plane.node_assets import node_assets
from support.control_plane.node_pods import restricted_namespace
from support.control_plane.node_release import NodeRelease, release
from support.control_plane.node_service import NodeService
from support.control_plane.waiting import until
from support.helm import Helm, helm_program
from support.releases import last_release
from support.steady_load import Outcome

RATE = 0.5
"""Short requests a second: half of what two cores hold beside two streams and a long prefill."""

STREAM_S = 30.0
DRAIN_S = 240
"""Proxies and pods let a stream end that takes much longer while new pods load their model on the same two cores."""

LEAST_REQUESTS = 200
API_DOWN_S = 120.0
COMMAND = "flowprefill bench figures --set cluster --only requests"


@contextmanager
def quickstart() -> Iterator[tuple[NodeService, NodeRelease]]:
    """The sample on a node of its own, with chart and operator of the last release and the serving images of this
    checkout."""
    programs = have(node_assets)
    built = [have(lambda name=name: image(name)) for name in ("operator", "serving", "proxy")]
    with tempfile.TemporaryDirectory(prefix="fp-") as folder:
        node = Node(programs, Path(folder) / "n")
        node.start()
        try:
            last = last_release(Path(folder) / "release")
            chart = last.chart(Helm(helm_program(), Path(folder)))
            for item in (*built, released_operator(last, Path(folder))):
                node.load_image(item.archive)
            with (
                release(node, Path(folder), *_tags(), chart=chart) as installed,
                restricted_namespace(node) as namespace,
            ):
                service = NodeService(node, namespace, "quickstart")
                service.kubectl("apply", "-f", str(sample_path("quickstart.yaml")))
                service.wait_ready()
                yield service, installed
        finally:
            node.stop()


def _tags() -> tuple[str, str]:
    """Which images an installation of the last release names."""
    ours = [f"serving.images.{name}.tag={version('flowprefill')}" for name in ("torch", "simulated", "proxy")]
    return "--set", ",".join([f"image.tag={TAG}", *ours])


def requests(bench: Bench) -> Iterator[Row]:
    """Every transition under a load of its own; then a row of the failures of all, and one of the pods started again."""
    outcomes: list[Outcome] = []
    told: list[str] = []
    with quickstart() as (service, installed), tempfile.TemporaryDirectory() as folder:
        small = {"resources": {"requests": {"cpu": "100m"}}}  # leaves room for a second pod of each role
        service.change({"prefill": small, "decode": small, "termination": {"drainSeconds": DRAIN_S}})
        service.wait_ready()

        def under_load(name: str, change: Callable[[], None]) -> None:
            bench.progress.step(f"{name}, under load")
            with service.load(Path(folder) / "outcomes", rate=RATE, stream_s=STREAM_S) as found:
                change()
            failed = [outcome for outcome in found if outcome.failure is not None]
            told.append(f"{name} {len(failed)}/{len(found)}")
            told.extend(f"({outcome.kind}: {outcome.failure})" for outcome in failed[:3])
            outcomes.extend(found)

        under_load("rolling update", lambda: _roll(service))
        under_load("scale up and down, eviction", lambda: _scale(service))
        before = service.lives()
        under_load("operator restart", lambda: _restart(service, installed))
        under_load("chart upgrade", lambda: _upgrade(service, installed))
        changed = sum(service.lives().get(uid) != restarts for uid, restarts in before.items())
        under_load("API server down for 2 minutes", lambda: _api_down(service))
        rolls = 0
        while len(outcomes) < LEAST_REQUESTS:
            rolls += 1
            under_load(f"rolling update {rolls + 1}", lambda: _roll(service))
    yield Row(
        name="requests failed during rolling update, scale up and down, eviction, operator restart, chart upgrade, API server down",
        value=sum(outcome.failure is not None for outcome in outcomes),
        op="<=",
        bar=0,
        command=COMMAND,
        detail=f"{len(outcomes)} requests at {RATE} a second beside a long prefill and two streams of "
        f"{_median_s(outcomes, 'stream'):.0f} s (median); failed/all: " + ", ".join(told),
    )
    yield Row(
        name="pod UIDs and restart counts changed by operator restart or chart upgrade",
        value=changed,
        op="<=",
        bar=0,
        command=COMMAND,
        detail=f"{len(before)} pods",
    )


def _median_s(outcomes: list[Outcome], kind: str) -> float:
    return statistics.median(item.ended_s - item.began_s for item in outcomes if item.kind == kind)


def _roll(service: NodeService) -> None:
    tokens = service.get()["spec"]["engine"]["kvCacheTokens"]
    service.change({"engine": {"kvCacheTokens": 8192 if tokens != 8192 else 12288}})
    service.wait_ready()


def _scale(service: NodeService) -> None:
    service.change({"prefill": {"replicas": 2}})
    until(lambda: _ready(service) == 2, "two prefill pods", within_s=200.0)
    evicted = service.pods("prefill")[0]["metadata"]
    path = f"/api/v1/namespaces/{service.namespace}/pods/{evicted['name']}/eviction"
    meta = {"name": evicted["name"], "namespace": service.namespace}
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
    service.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))
    until(
        lambda: evicted["uid"] not in service.lives("prefill") and _ready(service) == 2,
        "another pod in the place of the evicted one",
        within_s=200.0,
    )
    service.change({"prefill": {"replicas": 1}})
    until(lambda: len(service.pods("prefill")) == 1, "one prefill pod", within_s=200.0)
    service.wait_ready()


def _ready(service: NodeService) -> int:
    return int(service.get()["status"]["roles"]["prefill"]["readyReplicas"])


def _restart(service: NodeService, installed: NodeRelease) -> None:
    installed.restart()
    classes = [{**c, "weight": 2} for c in service.get()["spec"]["sloClasses"]]
    service.change({"sloClasses": classes})
    service.wait_for("ConfigApplied", within_s=150.0)


def _upgrade(service: NodeService, installed: NodeRelease) -> None:
    """To this checkout's chart and operator, with another default image for new pods, until it has said that it saw both."""
    installed.upgrade("--reset-values", "--set", "serving.images.torch.tag=later,logLevel=debug")
    until(lambda: "upgradeAvailable" in service.get()["status"], "the operator names its newer image")


def _api_down(service: NodeService) -> None:
    service.node.plane.stop_api()
    time.sleep(API_DOWN_S)
    service.node.plane.start_api()
    service.wait_ready()


def size(bench: Bench) -> Iterator[Row]:
    """The operator's image, over the base that it was built on."""
    bench.progress.step("the operator's image")
    built = have(lambda: image("operator"))
    yield Row(
        name="operator image over its base, MB",
        value=built.size_over_base_bytes / 1e6,
        op="<=",
        bar=150,
        command="flowprefill bench figures --set cluster --only image",
    )


FIGURES = (
    Figure(
        name="requests", summary="requests that fail while the cluster changes", minutes=10, measure=requests
    ),
    Figure(name="image", summary="size of the operator's image", minutes=3, measure=size),
)
