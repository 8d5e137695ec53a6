"""One pass over one service, against objects behind a small API and pods that are not there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from flowprefill_operator.apply import Applier
from flowprefill_operator.cluster.client import Cluster
from flowprefill_operator.cluster.errors import Unavailable
from flowprefill_operator.controller.metrics import OperatorMetrics
from flowprefill_operator.controller.mounts import Mounts
from flowprefill_operator.controller.prober import Prober
from flowprefill_operator.controller.reconcile import Reconciler
from flowprefill_operator.controller.retry import FIRST_PAUSE_S
from flowprefill_operator.controller.services import Services
from flowprefill_operator.controller.surroundings import Surroundings
from flowprefill_operator.kinds import PODS
from flowprefill_operator.observe.store import Store
from flowprefill_operator.settings import PlanSettings
from support.cluster_objects import owned_object, pod_status, running, status_body
from support.kept_objects import KeptObjects
from support.services import MINIMAL_SPEC, Spec, document, merged
from support.small_api import Answer, Request, small_api

KEY = ("ns", "example")
UID = "uid-of-the-service"
QUOTA = "x is forbidden: exceeded quota: small, requested: count/x=1, used: count/x=1, limited: count/x=1"


@dataclass(slots=True)
class Passes:
    """An operator and its one service."""

    objects: KeptObjects
    reconciler: Reconciler

    def ask(self, changes: Spec | None = None, *, raw: Spec | None = None, **metadata: Any) -> None:
        """This is the service now, and the operator has heard of it."""
        known = self.objects.find("FlowPrefillService", "example")
        generation = 1 if known is None else known["metadata"]["generation"] + 1
        body = document(merged(MINIMAL_SPEC, changes or {}), namespace="ns", uid=UID, generation=generation)
        body["metadata"] |= metadata
        if raw is not None:
            body["spec"] = raw
        if known is not None and "status" in known:
            body["status"] = known["status"]
        self.objects.add(body)
        self.reconciler.services.put(body)

    async def run(self) -> float | None:
        return await self.reconciler(KEY)

    def status(self) -> dict[str, Any]:
        found = self.objects.find("FlowPrefillService", "example")
        assert found is not None
        status: dict[str, Any] = found.get("status", {})
        return status

    def condition(self, name: str) -> tuple[str, str]:
        found = next(c for c in self.status()["conditions"] if c["type"] == name)
        return found["status"], found["reason"]

    def told(self) -> list[str]:
        found = [event["reason"] for event in self.objects.events]
        self.objects.events.clear()
        return found

    def metric(self, name: str, **labels: str) -> float | None:
        return self.reconciler.metrics.registry.get_sample_value(f"flowprefill_operator_{name}", labels)


def operator(cluster: Cluster, http: aiohttp.ClientSession, objects: KeptObjects) -> Passes:
    surroundings, store = Surroundings(), Store(lambda owner: None)
    reconciler = Reconciler(
        cluster=cluster,
        services=Services(),
        store=store,
        applier=Applier(cluster, store, served=surroundings.serves),
        prober=Prober(http, lambda key: None),
        mounts=Mounts(cluster),
        surroundings=surroundings,
        settings=PlanSettings(),
        metrics=OperatorMetrics(),
        instance="operator-0",
    )
    return Passes(objects, reconciler)


@pytest.fixture
async def passes() -> AsyncIterator[Passes]:
    async with small_api() as (api, cluster), aiohttp.ClientSession() as http:
        found = operator(cluster, http, KeptObjects(api))
        yield found
        await found.reconciler.prober.close()


def on(plural: str, answer: Answer, *, part: str = "") -> Any:
    def refuse(request: Request) -> Answer | None:
        mine = f"/{plural}/" in request.path and request.path.endswith(part) and request.method == "PATCH"
        return answer if mine else None

    return refuse


async def test_a_first_pass_makes_everything_and_tells_what_it_waits_for_and_a_second_writes_nothing(
    passes: Passes,
) -> None:
    passes.ask()
    await passes.run()
    assert {"example-proxy"} < passes.objects.names("Deployment")
    assert passes.condition("Accepted") == ("True", "Valid")
    assert passes.condition("Ready") == ("False", "PodsStarting")
    assert passes.condition("Reconciling")[0] == "True"
    assert passes.status()["observedGeneration"] == 1
    assert passes.objects.writes()[-1] == "PATCH flowprefillservices/example/status"
    await passes.run()
    assert passes.objects.writes() == []
    assert (passes.metric("status_writes_total"), passes.told()) == (1, [])


async def test_a_service_that_is_gone_or_going_is_left_to_the_garbage_collector(passes: Passes) -> None:
    assert await passes.run() is None
    passes.ask(deletionTimestamp="2026-01-01T00:00:00Z")
    assert await passes.run() is None
    assert passes.objects.writes() == []


async def test_a_service_that_cannot_be_read_changes_nothing_and_is_told_once(passes: Passes) -> None:
    passes.ask()
    await passes.run()
    made = passes.objects.names("Deployment")
    passes.objects.writes()
    passes.ask(raw={"model": {"uri": 3}})
    assert await passes.run() is None
    assert passes.condition("Accepted") == ("False", "InvalidSpec")
    assert passes.objects.writes() == ["PATCH flowprefillservices/example/status"]
    assert passes.objects.names("Deployment") == made
    await passes.run()
    assert passes.objects.writes() == []
    passes.ask()
    await passes.run()
    assert passes.condition("Accepted") == ("True", "Valid")


async def test_a_paused_service_is_left_as_it_is_and_its_status_is_told(passes: Passes) -> None:
    passes.ask()
    await passes.run()
    passes.objects.writes()
    passes.ask({"paused": True, "prefill": {"replicas": 7}})
    await passes.run()
    assert passes.objects.writes() == ["PATCH flowprefillservices/example/status"]
    assert passes.condition("Ready") == ("Unknown", "Paused")
    passes.ask({"prefill": {"replicas": 7}})
    await passes.run()
    assert any("deployments" in write for write in passes.objects.writes())


async def test_what_no_pods_can_be_planned_for_is_refused_and_what_is_there_stays(passes: Passes) -> None:
    passes.ask()
    await passes.run()
    passes.objects.writes()
    passes.ask({"prefill": {"nodes": 2}})
    await passes.run()
    assert passes.objects.writes() == ["PATCH flowprefillservices/example/status"]
    assert passes.condition("Accepted") == ("False", "MultiNodeUnsupported")
    assert passes.told() == ["MultiNodeUnsupported"]


async def test_a_pod_template_that_the_api_server_refuses_is_not_rolled_out(passes: Passes) -> None:
    passes.ask()
    await passes.run()
    passes.objects.writes()
    passes.ask({"prefill": {"podTemplate": {"spec": {"restartPolicy": "Sometimes"}}}})
    dry: list[Request] = []

    def refuse(request: Request) -> Answer | None:
        if "dryRun" not in request.query:
            return None
        dry.append(request)
        return 422, status_body(422, "Invalid", 'restartPolicy: Unsupported value: "Sometimes"')

    passes.objects.refuse = refuse
    await passes.run()
    assert passes.objects.writes() == ["PATCH flowprefillservices/example/status"]
    assert passes.condition("Accepted") == ("False", "InvalidPodTemplate")
    (accepted,) = [c for c in passes.status()["conditions"] if c["type"] == "Accepted"]
    assert 'restartPolicy: Unsupported value: "Sometimes"' in accepted["message"]
    asked = len(dry)
    await passes.run()
    assert len(dry) == asked, "the same question has the same answer"
    passes.objects.refuse = lambda request: None
    passes.ask({"prefill": {"podTemplate": {"spec": {"restartPolicy": "Always"}}}})
    await passes.run()
    assert passes.condition("Accepted") == ("True", "Valid")
    assert any("deployments" in write for write in passes.objects.writes())


async def test_the_proxys_pods_are_tried_with_the_others_though_they_are_replaced_last(
    passes: Passes,
) -> None:
    passes.ask()
    await passes.run()
    passes.objects.writes()
    passes.ask({"proxy": {"podTemplate": {"spec": {"restartPolicy": "Never"}}}})

    def refuse(request: Request) -> Answer | None:
        if "dryRun" not in request.query or not request.path.endswith("example-proxy"):
            return None
        return 422, status_body(422, "Invalid", 'restartPolicy: Unsupported value: "Never"')

    passes.objects.refuse = refuse
    await passes.run()
    assert passes.condition("Accepted") == ("False", "InvalidPodTemplate")
    assert passes.objects.writes() == ["PATCH flowprefillservices/example/status"]


async def test_a_pass_that_could_not_make_everything_tells_why_and_is_repeated(passes: Passes) -> None:
    passes.ask()
    passes.objects.refuse = on("deployments", (403, status_body(403, "Forbidden", QUOTA)))
    again_s = await passes.run()
    assert again_s is not None
    assert again_s <= FIRST_PAUSE_S
    assert passes.condition("ObjectsApplied") == ("False", "QuotaExceeded")
    assert passes.condition("Stalled") == ("True", "QuotaExceeded")
    assert passes.told() == ["QuotaExceeded"]
    assert passes.metric("reconcile_errors_total", error_type="Refused") == 3
    await passes.run()
    assert passes.told() == []
    passes.objects.refuse = lambda request: None
    await passes.run()
    assert passes.condition("ObjectsApplied") == ("True", "Applied")
    assert passes.objects.names("Deployment") != set()


async def test_a_refusal_is_a_warning_once_and_again_for_another_spec_and_is_forgotten_with_the_service(
    passes: Passes, caplog: pytest.LogCaptureFixture
) -> None:
    def warned() -> list[str]:
        found = [
            vars(record)["object"]
            for record in caplog.records
            if (record.levelno, record.message) == (logging.WARNING, "object not applied")
        ]
        caplog.clear()
        return found

    passes.ask()
    passes.objects.refuse = on("deployments", (403, status_body(403, "Forbidden", QUOTA)), part="-proxy")
    caplog.set_level(logging.DEBUG, logger="flowprefill_operator.controller.reconcile")
    await passes.run()
    assert warned() == ["example-proxy"]
    await passes.run()
    assert warned() == []
    passes.reconciler.services.drop(KEY)
    assert await passes.run() is None
    passes.objects.items.clear()
    passes.ask()
    await passes.run()
    assert warned() == ["example-proxy"]
    passes.ask({"prefill": {"replicas": 2}})
    await passes.run()
    assert warned() == ["example-proxy"]


async def test_a_right_that_the_operator_lacks_to_look_is_told(passes: Passes) -> None:
    passes.ask()
    passes.reconciler.surroundings.deny("watch", PODS)
    await passes.run()
    assert passes.condition("Ready") == ("False", "Forbidden")
    passes.reconciler.surroundings.allow("watch", PODS)
    await passes.run()
    assert passes.condition("Ready") == ("False", "PodsStarting")


@pytest.mark.parametrize("status", [404, 409])
async def test_a_status_of_a_service_that_is_another_by_now_is_nobody_s(passes: Passes, status: int) -> None:
    passes.ask()
    passes.objects.refuse = on(
        "flowprefillservices", (status, status_body(status, "", "uid")), part="/status"
    )
    await passes.run()
    assert passes.status() == {}
    assert passes.told() == []


async def test_a_status_that_cannot_be_written_is_a_failed_pass(passes: Passes) -> None:
    passes.ask()
    passes.objects.refuse = on("flowprefillservices", (500, b"no"), part="/status")
    with pytest.raises(Unavailable):
        await passes.run()
    assert passes.metric("reconcile_total", result="error") == 1


async def test_a_new_operator_keeps_the_status_until_pods_have_been_asked(passes: Passes) -> None:
    passes.ask()
    await passes.run()
    said = {
        **passes.status(),
        "revision": {"current": "552c2f0620"},
        "conditions": [
            {
                "type": name,
                "status": "True",
                "reason": "Serving",
                "message": "",
                "observedGeneration": 1,
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
            for name in ("Ready", "Available")
        ],
    }
    service = passes.objects.find("FlowPrefillService", "example")
    assert service is not None
    service["status"] = said
    passes.objects.add(service)
    passes.reconciler.services.put(service)
    for role in ("prefill", "decode", "proxy"):
        pod = owned_object(
            PODS,
            f"pod-{role}",
            labels={
                "flowprefill.io/service": "example",
                "flowprefill.io/role": role,
                "flowprefill.io/revision": "552c2f0620",
            },
            spec={"containers": [{"ports": [{"name": "admin", "containerPort": 1}]}]},
            status=pod_status(running(ready=True), phase="Running", ready=True) | {"podIP": "127.0.0.1"},
        )
        passes.reconciler.store.put(PODS, pod)
    passes.objects.writes()
    await passes.run()
    assert passes.status() == said
    assert passes.reconciler.prober.reports(KEY).proven == {"552c2f0620"}
    # Nobody listens on the ports of these pods, which is known soon.
    async with asyncio.timeout(30):
        while passes.reconciler.prober.is_new(KEY):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await passes.run()
    assert passes.status() != said
    assert passes.condition("Ready")[0] == "False"
    assert set(passes.told()) == {"NotReady", "NotAvailable"}
