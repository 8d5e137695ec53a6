"""Two hundred services at once, beside five thousand objects of the same kinds that are none of the operator's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from cluster_figures.stage import OPERATOR, stage
from flowprefill.bench.figures.row import Bench, Figure, Row
from flowprefill_operator.kinds import CONFIG_MAPS, OWNED, SERVICES, Kind
from support.control_plane.audit import num_lines, writes
from support.control_plane.operated import Json, Operated, simulated

NUM_SERVICES = 200
NUM_FOREIGN = 5000
AT_ONCE = 16
CONVERGED_S = 900.0
WRITES_PER_CHILD = 2
WRITES_PER_SERVICE = 10
COMMAND = "flowprefill bench figures --set cluster --only scale"


def scale(bench: Bench) -> Iterator[Row]:
    """Convergence, writes by the audit log, and the operator's memory as the kernel counts its peak."""
    with stage() as cluster:
        bench.progress.step(f"{NUM_FOREIGN} foreign objects")
        _foreign(cluster)
        mark = num_lines(cluster.plane.audit_log)
        start_s = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(
                threads.map(
                    lambda n: cluster.apply("default", simulated(f"svc-{n:03d}")), range(NUM_SERVICES)
                )
            )
        ready = 0
        while ready < NUM_SERVICES and time.monotonic() < start_s + CONVERGED_S:
            time.sleep(2.0)
            ready = sum(map(_ready, cluster.list(SERVICES, "default")))
        taken_s = time.monotonic() - start_s
        written = list(writes(cluster.plane.audit_log, OPERATOR, skip_lines=mark))
        memory = cluster.operator.memory() / 2**20
    children = sum(w.verb == "patch" and w.status == 201 for w in written)
    allowed = WRITES_PER_CHILD * children + WRITES_PER_SERVICE * NUM_SERVICES
    yield Row(
        name="200 services at once: services not converged",
        value=NUM_SERVICES - ready,
        op="<=",
        bar=0,
        command=COMMAND,
        detail=f"all were after {taken_s:.0f} s, beside {NUM_FOREIGN} foreign objects; pods are a hollow node's",
    )
    yield Row(
        name="200 services at once: writes over (2 per child plus 10 per service)",
        value=len(written) / allowed,
        op="<=",
        bar=1.0,
        command=COMMAND,
        detail=f"{len(written)} writes, {children} children",
    )
    yield Row(
        name="200 services at once: operator memory peak, MiB",
        value=memory,
        op="<=",
        bar=250.0,
        command=COMMAND,
    )


def _foreign(cluster: Operated) -> None:
    bodies: dict[Kind, Json] = {
        CONFIG_MAPS: {"data": {"text": "x" * 2000}},
        _kind("ServiceAccount"): {},
        _kind("ControllerRevision"): {"revision": 1, "data": {"text": "y" * 500}},
        _kind("NetworkPolicy"): {"spec": {"podSelector": {"matchLabels": {"app": "other"}}}},
        _kind("Service"): {"spec": {"clusterIP": "None", "ports": [{"port": 80}]}},
    }
    kinds = list(bodies)

    def create(number: int) -> None:
        kind = kinds[number % len(kinds)]
        meta = {"metadata": {"name": f"foreign-{number}", "labels": {"app": "other"}}}
        cluster.create(kind, "default", meta | bodies[kind])

    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(create, range(NUM_FOREIGN)))


def _kind(name: str) -> Kind:
    return next(kind for kind in OWNED if kind.kind == name)


def _ready(body: Json) -> bool:
    conditions = body.get("status", {}).get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


FIGURES = (Figure(name="scale", summary="200 services at once", minutes=3, measure=scale),)
