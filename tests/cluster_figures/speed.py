"""How fast a service's objects are there, and that nothing is written when nothing changes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from cluster_figures.stage import OPERATOR, stage
from flowprefill.bench.figures.row import Bench, Figure, Row
from support.control_plane.audit import num_lines, writes
from support.control_plane.operated import Operated, simulated
from support.control_plane.waiting import until

NUM_APPLIES = 30
NUM_SERVICES = 50
NUM_RESYNCS = 10
RESYNC_S = 5
STATUS = "flowprefillservices/status"


def apply_to_child(bench: Bench) -> Iterator[Row]:
    """From the API server's receipt of the apply to the answer of the operator's last create, by the audit log."""
    bench.progress.step(f"{NUM_APPLIES} applies")
    with stage() as cluster:
        warm = _one(cluster, "warm")
        taken_s = [_one(cluster, f"apply-{number}") for number in range(NUM_APPLIES)]
    yield Row(
        name="seconds from apply to the last planned child, p95 of 30 applies, warm operator",
        value=float(np.percentile(taken_s, 95)),
        op="<=",
        bar=1.0,
        command="flowprefill bench figures --set cluster --only apply",
        detail=f"median {np.median(taken_s):.3f} s, largest {max(taken_s):.3f} s, the first of all {warm:.3f} s",
    )


def _one(cluster: Operated, namespace: str) -> float:
    cluster.plane.kubectl("create", "namespace", namespace)
    log = cluster.plane.audit_log
    mark = num_lines(log)
    cluster.apply(namespace, simulated("web", prefill={"replicas": 2}))
    cluster.wait_ready(namespace, "web")
    begun_s = min(
        w.received_s for w in writes(log, "admin", skip_lines=mark) if w.resource == "flowprefillservices"
    )
    created = [
        w.done_s for w in writes(log, OPERATOR, skip_lines=mark) if w.status == 201 and w.verb == "patch"
    ]
    return max(created) - begun_s


def calm(bench: Bench) -> Iterator[Row]:
    """Writes while nothing happens."""
    with stage(resyncSeconds=RESYNC_S) as cluster:
        names = [f"calm-{number}" for number in range(NUM_SERVICES)]
        for name in names:
            cluster.apply("default", simulated(name))
        for name in names:
            cluster.wait_ready("default", name, within_s=300.0)
        before = _resyncs(cluster)
        until(lambda: _resyncs(cluster) > before, "one more resync", within_s=120.0)
        mark, begun = num_lines(cluster.plane.audit_log), _resyncs(cluster)
        bench.progress.step(f"{NUM_RESYNCS} resyncs of {NUM_SERVICES} services")
        until(lambda: _resyncs(cluster) >= begun + NUM_RESYNCS, "ten resyncs", within_s=600.0)
        found = list(writes(cluster.plane.audit_log, OPERATOR, skip_lines=mark))
    yield Row(
        name="mutating requests of the operator in ten resyncs of 50 unchanged services",
        value=len(found),
        op="<=",
        bar=0,
        command="flowprefill bench figures --set cluster --only calm",
        detail=", ".join(f"{w.verb} {w.resource}" for w in found[:5]) or "the Lease is left out of the count",
    )


def _resyncs(cluster: Operated) -> float:
    found = re.search(r'resyncs_total\{result="ok"\} ([0-9.]+)', cluster.operator.metrics())
    return float(found[1]) if found else 0.0


FIGURES = (
    Figure(name="apply", summary="from apply to the last child", minutes=2, measure=apply_to_child),
    Figure(name="calm", summary="writes while nothing changes", minutes=3, measure=calm),
)
