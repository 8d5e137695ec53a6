"""One pass over one service: read what is known, decide, apply, tell. Idempotent; every trigger leads here.

1. Parse the service, or say why not.   2. Decide the goal.   3. Bring it about.
4. Ask pods what is not known yet.      5. Write the status, if it is another one, and Events for transitions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from flowprefill_crd import FlowPrefillService, InvalidService, parse_service
from flowprefill_operator.apply import Applied, Applier
from flowprefill_operator.cluster.client import Cluster
from flowprefill_operator.cluster.errors import ClusterError, Invalid, NotFound
from flowprefill_operator.controller.events import tell, transitions
from flowprefill_operator.controller.metrics import OperatorMetrics
from flowprefill_operator.controller.mounts import Mounts
from flowprefill_operator.controller.prober import Ask, Prober
from flowprefill_operator.controller.queue import Key
from flowprefill_operator.controller.retry import Retry, next_retry
from flowprefill_operator.controller.services import Services, owner_of
from flowprefill_operator.controller.surroundings import Surroundings
from flowprefill_operator.kinds import SERVICES
from flowprefill_operator.observe.store import Store
from flowprefill_operator.resources.base import Object
from flowprefill_operator.revisions import recorded_deployments
from flowprefill_operator.rollout import Goal, goal
from flowprefill_operator.scene import PROXY, scene
from flowprefill_operator.settings import PlanSettings
from flowprefill_operator.status.compute import as_json, status_of
from flowprefill_operator.status.conditions import live_generation, running
from flowprefill_operator.status.invalid import invalid_status
from flowprefill_operator.status.view import View
from flowprefill_operator.unsupported import INVALID_TEMPLATE, lost_container, unsupported

log = logging.getLogger(__name__)

ASK_AGAIN_S = 60.0
"""How long a refused pod template counts as refused: an admission may have changed its mind."""


@dataclass(slots=True, kw_only=True)
class Reconciler:
    """The parts that a pass works with."""

    cluster: Cluster
    services: Services
    store: Store
    applier: Applier
    prober: Prober
    mounts: Mounts
    surroundings: Surroundings
    settings: PlanSettings
    metrics: OperatorMetrics
    instance: str
    _refused: dict[Key, tuple[str, float, tuple[str, str]]] = field(default_factory=dict)
    """Revision, when the API server was asked (monotonic seconds), and why it is not acted on."""

    _retries: dict[Key, Retry] = field(default_factory=dict)
    """Of services whose last pass could not bring everything about."""

    async def __call__(self, key: Key) -> float | None:
        """One pass; after how many seconds the next one is due, or None."""
        began_s = time.perf_counter()
        result = "error"
        try:
            again_s = await self._pass(key)
            result = "ok" if again_s is None else "again"
            return again_s
        finally:
            self.metrics.reconciles.labels(result).inc()
            self.metrics.duration.observe(time.perf_counter() - began_s)

    async def _pass(self, key: Key) -> float | None:
        body = self.services.get(key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self.prober.forget(key)
            self._refused.pop(key, None)
            self._retries.pop(key, None)
            return None
        try:
            service = parse_service(body)
        except InvalidService as error:
            await self._write(body, invalid_status(body, str(error), now=_now()))
            return None
        view = await self._act(key, service)
        retry_s, ask_s = self._retry(key, view), self._ask(key, view)
        mounts, look_s = await self.mounts.unmounted(view.scene.pods)
        again_s = min((s for s in (retry_s, ask_s, look_s) if s is not None), default=None)
        refused = tuple(self.mounts.forbidden) if look_s is not None else ()  # asked for starting pods alone
        view = replace(
            view,
            reports=replace(self.prober.reports(key), mounts=mounts),
            forbidden=(*view.forbidden, *refused),
        )
        seen = 0 if service.status is None else service.status.observed_generation
        if seen == service.metadata.generation and self.prober.is_new(key):
            return again_s  # a new operator has not heard of the pods yet; what the status says holds until it has
        status = status_of(view)
        if await self._write(body, as_json(status)):
            told = transitions(service.status, status)
            await tell(self.cluster, service, told, self.instance)
        return again_s

    async def _act(self, key: Key, service: FlowPrefillService) -> View:
        """Decide, and apply unless the spec is refused or paused."""
        uid, owner = service.metadata.uid, owner_of(key)
        self._recall(key, service)
        observed = self.store.of(owner)
        refusal = unsupported(service)
        decided: Goal | None = None
        applied: Applied | None = None
        if refusal is None:
            decided = goal(service, self.settings, observed, self.prober.reports(key).proven)
            refusal = await self._template_refusal(key, decided)
        if refusal is not None:
            decided = None
        elif decided is not None and not service.spec.paused:
            applied = await self.applier.bring_about(
                decided, namespace=service.metadata.namespace, label=owner[1], uid=uid
            )
            self.metrics.writes.inc(applied.writes)
            for failure in applied.failures:
                self.metrics.errors.labels(type(failure.error).__name__).inc()
        return View(
            service=service,
            now=_now(),
            scene=scene(self.store.of(owner), uid),
            goal=decided,
            applied=applied,
            refusal=refusal,
            forbidden=self.surroundings.forbidden(),
            schema_outdated=self.surroundings.schema_outdated,
        )

    def _retry(self, key: Key, view: View) -> float | None:
        """After how long to try again what could not be brought about. What is new of it is a warning in the log."""
        failures = () if view.applied is None else view.applied.failures
        now_s = time.monotonic()
        retry = next_retry(
            self._retries.pop(key, None),
            generation=view.service.metadata.generation,
            failures=failures,
            now_s=now_s,
        )
        if retry is None:
            return None
        self._retries[key] = retry
        for failure in failures:
            log.log(
                logging.WARNING if failure in retry.news else logging.DEBUG,
                "object not applied",
                extra={
                    "service": "/".join(key),
                    "kind": failure.kind.kind,
                    "object": failure.name,
                    "reason": str(failure.error),
                    "again_s": round(retry.due_s - now_s, 1),
                },
            )
        return retry.due_s - now_s

    def _recall(self, key: Key, service: FlowPrefillService) -> None:
        """A revision that the status says to have served need not prove itself again to a new operator."""
        status = service.status
        if status is not None and status.revision is not None and status.revision.current is not None:
            self.prober.remember_proven(key, status.revision.current)

    async def _template_refusal(self, key: Key, decided: Goal) -> tuple[str, str] | None:
        """What the API server says against the pods of a new revision, of all its roles, before anything of it is made."""
        if decided.target.recorded is not None:
            return None
        known = self._refused.get(key)
        if (
            known is not None
            and known[0] == decided.target.name
            and time.monotonic() < known[1] + ASK_AGAIN_S
        ):
            return known[2]
        deployments = recorded_deployments(decided.steps)
        lost = lost_container(deployments)
        if lost is not None:
            return lost
        failure = await self.applier.dry_run(deployments)
        if failure is None or not isinstance(failure.error, Invalid):
            return None
        refusal = (
            INVALID_TEMPLATE,
            f"the API server refuses the pods of {failure.name}: {failure.error.message}",
        )
        self._refused[key] = (decided.target.name, time.monotonic(), refusal)
        return refusal

    def _ask(self, key: Key, view: View) -> float | None:
        """Have pods asked for what the status lacks; after how long to look again."""
        pods = {
            item.name: f"{_host(pod.ip)}:{pod.admin_port}"
            for item, pod in running(view)
            if pod.admin_port is not None
        }
        proxies = {
            item.name: pods[item.name]
            for item, pod in running(view)
            if pod.role == PROXY and item.name in pods
        }
        prove, provers = to_prove(view, self.prober.reports(key).proven, proxies)
        ask = Ask(
            proxies=proxies,
            pods=pods,
            generation=live_generation(view),
            prove=prove,
            provers=provers,
        )
        return self.prober.ask(key, ask)

    async def _write(self, body: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
        """Write the status unless it is the one that is there. Whether it was written."""
        if status == body.get("status"):
            return False
        meta = body["metadata"]
        item: Object = {
            "apiVersion": SERVICES.api_version,
            "kind": SERVICES.kind,
            "metadata": {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]},
            "status": dict(status),
        }
        try:
            answer = await self.cluster.apply(item, force=True, part="status")
        except NotFound:
            return False  # deleted meanwhile
        except ClusterError as error:
            if error.status == 409:  # another service of this name
                return False
            raise
        self.metrics.status_writes.inc()
        self.services.put(answer)
        return True


def to_prove(
    view: View, proven: frozenset[str], proxies: Mapping[str, str]
) -> tuple[str | None, dict[str, str]]:
    """The revision to try with one token, and the proxies of it that can: the target first, else the one that it replaces
    when that has not served either."""
    if view.goal is None:
        return None, {}
    target, previous = view.goal.target.name, view.goal.previous
    wanted = [target] if view.goal.to_prove else []
    if previous is not None and previous not in proven and view.scene.serves(previous):
        wanted.append(previous)
    for revision in wanted:
        found = {
            item.name: proxies[item.name]
            for item, pod in running(view)
            if item.name in proxies and pod.revision == revision
        }
        if found:
            return revision, found
    return None, {}


def _host(ip: str | None) -> str:
    return f"[{ip}]" if ip is not None and ":" in ip else str(ip)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
