"""Brings the cluster to a goal: hand-overs, server-side apply of what differs, prune. Every step can be repeated."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from flowprefill_operator.cluster.client import REPLICAS_MANAGER, Cluster
from flowprefill_operator.cluster.errors import ClusterError, Invalid
from flowprefill_operator.kinds import CLAIMS, DEPLOYMENTS, Kind, kind_of
from flowprefill_operator.observe.managed_fields import covers
from flowprefill_operator.observe.observed import APPLIED, Observed, observe
from flowprefill_operator.observe.store import Store
from flowprefill_operator.resources.base import Object
from flowprefill_operator.revisions import key_of
from flowprefill_operator.rollout import Goal

log = logging.getLogger(__name__)

AT_ONCE = 8
"""Requests of one pass under way at the same time."""


ALLOCATED: Mapping[str, tuple[str, ...]] = {
    "Service": ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy"),
    "Deployment": ("replicas",),
    "PersistentVolumeClaim": ("volumeName", "volumeMode", "storageClassName"),
    "Job": ("selector", "manualSelector", "completionMode"),
}
"""Fields of a spec that somebody else rightly sets: the API server, a volume binder, an autoscaler."""


class NameConflict(ClusterError):
    """An object of this name exists and is not the service's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One object that is not as wanted, and why."""

    kind: Kind
    name: str
    error: ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What a pass did. `absent` are wanted objects whose API is not there."""

    writes: int
    failures: tuple[Failure, ...]
    absent: tuple[Object, ...] = ()


class Applier:
    """Applies goals of services. Holds what its last writes answered, and nothing that cannot be lost."""

    def __init__(self, cluster: Cluster, store: Store, *, served: Callable[[Kind], bool]) -> None:
        """`served` says whether the API of an optional kind is there."""
        self._cluster = cluster
        self._store = store
        self._served = served
        self._answers: dict[
            str, tuple[str, str | None]
        ] = {}  # uid of an object: hash applied, fields owned then

    async def bring_about(self, goal: Goal, *, namespace: str, label: str, uid: str) -> Applied:
        """One pass. A group waits for the one before it; when that failed, what does not exist yet is not made."""
        known = self._store.of((namespace, label))
        count = _Count()
        failures: list[Failure] = []
        absent: list[Object] = []
        for name, replicas in goal.hand_over.items():
            await self._hand_over(namespace, name, replicas, count, failures)
        for step in goal.steps:
            absent += [item for item in step if not self._served(kind_of(item))]
            failed = {(f.kind, f.name) for f in failures}
            failures += await _together(
                [
                    partial(self._bring, item, known.get(key_of(item)), uid, count)
                    for item in step
                    if self._served(kind_of(item))
                    and key_of(item) not in failed
                    # Nothing new begins on what is not in place; what runs already is kept as it should be.
                    and (not failures or key_of(item) in known)
                ]
            )
        if not failures:
            failures += await _together([partial(self._prune, item, count) for item in goal.prune])
        return Applied(writes=count.writes, failures=tuple(failures), absent=tuple(absent))

    def keep_only(self, uids: set[str]) -> None:
        """Forget what was applied to objects that are gone."""
        self._answers = {uid: answer for uid, answer in self._answers.items() if uid in uids}

    async def dry_run(self, items: Sequence[Object]) -> Failure | None:
        """What the API server would refuse of these objects, first of all."""
        for item in items:
            kind, name = key_of(item)
            try:
                await self._cluster.apply(item, force=True, dry_run=True)
            except ClusterError as error:
                return Failure(kind=kind, name=name, error=error)
        return None

    async def _hand_over(
        self, namespace: str, name: str, replicas: int, count: _Count, failures: list[Failure]
    ) -> None:
        """Let another manager own the present number of pods too, so that dropping the field keeps it."""
        item: Object = {
            "apiVersion": DEPLOYMENTS.api_version,
            "kind": DEPLOYMENTS.kind,
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"replicas": replicas},
        }
        try:
            await self._cluster.apply(item, force=True, manager=REPLICAS_MANAGER)
            count.writes += 1
        except ClusterError as error:
            failures.append(Failure(kind=DEPLOYMENTS, name=name, error=error))

    async def _bring(self, item: Object, known: Observed | None, uid: str, count: _Count) -> Failure | None:
        kind, name = key_of(item)
        marked = _marked(item)
        if known is not None and self._as_applied(marked, known, uid):
            return None
        try:
            ours = known is not None and _ours(known, uid)
            if not ours:
                ours = await self._is_ours(item, uid)
            try:
                answer = await self._cluster.apply(marked, force=ours)
            except Invalid:
                if known is None or "spec" not in item:
                    raise
                await self._repair(item)
                answer = await self._cluster.apply(marked, force=True)
        except ClusterError as error:
            return Failure(kind=kind, name=name, error=error)
        count.writes += 1
        now = self._store.put(kind, answer)
        self._answers[now.uid] = (_hash_of(marked), now.fields)
        return None

    async def _repair(self, item: Object) -> None:
        """Take out what others have set and what cannot be beside the operator's own fields, such as an environment
        variable's value beside its valueFrom: apply leaves the fields of others alone."""
        kind, name = key_of(item)
        meta, spec = item["metadata"], item["spec"]
        assert isinstance(meta, Mapping)
        assert isinstance(spec, Mapping)
        found = await self._cluster.get(kind, str(meta["namespace"]), name)
        if found is None:
            return
        kept = {key: value for key, value in found["spec"].items() if key in ALLOCATED.get(kind.kind, ())}
        # Raises `Invalid`, with nothing changed, when it is the planned spec itself that is refused.
        await self._cluster.replace_spec(kind, found, {**kept, **spec}, dry_run=True)
        await self._cluster.replace_spec(kind, found, {**kept, **spec})
        log.warning(
            "foreign fields removed", extra={"kind": kind.kind, "object": f"{meta['namespace']}/{name}"}
        )

    async def _is_ours(self, item: Object, uid: str) -> bool:
        """Whether the object exists and is the service's; False when there is none. Raises `NameConflict`."""
        kind, name = key_of(item)
        meta: Any = item["metadata"]
        found = await self._cluster.get(kind, meta["namespace"], name)
        if found is None:
            return False
        there = observe(kind, found)
        if _ours(there, uid):
            return True
        if there.terminating:
            reason, message = "BeingDeleted", f'"{name}" of an earlier owner is being deleted'
        else:
            reason = "NameConflict"
            message = (
                f'"{name}" exists already and does not belong to this service; delete or rename it, '
                "or give the service another name"
            )
        raise NameConflict(verb="patch", resource=kind.resource, status=409, reason=reason, message=message)

    def _as_applied(self, marked: Object, known: Observed, uid: str) -> bool:
        """Whether the object was last applied like this and no field of it has another owner since."""
        meta: Any = marked["metadata"]
        if known.applied != _hash_of(marked) or known.fields is None:
            return False
        if known.controller != uid and meta.get("ownerReferences"):
            return False
        if self._answers.get(known.uid) == (known.applied, known.fields):
            return True
        return covers(json.loads(known.fields), marked)

    async def _prune(self, item: Observed, count: _Count) -> Failure | None:
        try:
            await self._cluster.delete(item.kind, item.namespace, item.name, uid=item.uid)
        except ClusterError as error:
            return Failure(kind=item.kind, name=item.name, error=error)
        count.writes += 1
        self._answers.pop(item.uid, None)
        self._store.forget(item.kind, item.namespace, item.name)
        log.info("object pruned", extra={"kind": item.kind.kind, "object": f"{item.namespace}/{item.name}"})
        return None


@dataclass(slots=True)
class _Count:
    writes: int = 0


async def _together(tasks: Sequence[Callable[[], Awaitable[Failure | None]]]) -> list[Failure]:
    """Do all, a few at a time; the failures in the order of the tasks."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(task: Callable[[], Awaitable[Failure | None]]) -> Failure | None:
        async with places:
            return await task()

    return [found for found in await asyncio.gather(*(one(task) for task in tasks)) if found is not None]


def _marked(item: Object) -> Object:
    """The object with the hash of itself as an annotation."""
    text = json.dumps(item, sort_keys=True, separators=(",", ":"))
    meta: Any = item["metadata"]
    annotations = dict(meta.get("annotations") or {}) | {
        APPLIED: hashlib.sha256(text.encode()).hexdigest()[:16]
    }
    return {**item, "metadata": {**meta, "annotations": annotations}}


def _hash_of(marked: Object) -> str:
    meta: Any = marked["metadata"]
    return str(meta["annotations"][APPLIED])


def _ours(there: Observed, uid: str) -> bool:
    """Whether an existing object is the service's: controlled by it, or a claim of its name that this operator has
    applied, now or for an earlier service, and that was to be retained."""
    if there.controller is not None:
        return there.controller == uid
    return there.kind == CLAIMS and there.fields is not None
