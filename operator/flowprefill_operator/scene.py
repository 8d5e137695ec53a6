"""A service's objects, sorted for decisions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flowprefill_operator import labels
from flowprefill_operator.kinds import DEPLOYMENTS
from flowprefill_operator.observe.observed import Key, Observed, Pod, Workload

PROXY = "proxy"
WORKER_ROLES = ("prefill", "decode", "colocated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A service's objects sorted for decisions. `deployments` is by role and revision, `pods` are not yet gone."""

    uid: str
    objects: Mapping[Key, Observed]
    deployments: Mapping[tuple[str, str], Observed]
    pods: tuple[tuple[Observed, Pod], ...]

    def workload(self, role: str, revision: str) -> Workload | None:
        found = self.deployments.get((role, revision))
        detail = None if found is None else found.detail
        return detail if isinstance(detail, Workload) else None

    def complete(self, role: str, revision: str) -> bool:
        """Whether a role has exactly the pods that were asked for, all ready."""
        found = self.deployments.get((role, revision))
        detail = None if found is None else found.detail
        if found is None or not isinstance(detail, Workload):
            return False
        return (
            detail.generation_seen >= found.generation
            and detail.updated >= detail.replicas
            and detail.current <= detail.replicas
            and detail.ready >= detail.replicas
        )

    def alive(self) -> Iterable[Pod]:
        """Pods that run or may come to run; one that was evicted stays as an object, and takes no part any more."""
        return (pod for _, pod in self.pods if pod.phase not in ("Failed", "Succeeded"))

    def started(self, revision: str) -> bool:
        """Whether a container of any of a revision's pods runs or has run."""
        return any(
            container.running or container.ended is not None or container.restarts > 0
            for _, pod in self.pods
            if pod.revision == revision
            for container in pod.containers
        )

    def serves(self, revision: str) -> bool:
        """Whether a revision has a ready pod that does both, or one for each of prefill and decode."""
        roles = ("colocated",) if ("colocated", revision) in self.deployments else ("prefill", "decode")
        return all((state := self.workload(role, revision)) is not None and state.ready > 0 for role in roles)


def scene(observed: Mapping[Key, Observed], uid: str) -> Scene:
    """What of the observed objects is the service's own."""
    own = {key: item for key, item in observed.items() if item.controller == uid}
    deployments = {
        (item.labels.get(labels.ROLE, ""), item.labels.get(labels.REVISION, "")): item
        for (kind, _), item in own.items()
        if kind == DEPLOYMENTS
    }
    pods = tuple((item, item.detail) for item in observed.values() if isinstance(item.detail, Pod))
    return Scene(uid=uid, objects=own, deployments=deployments, pods=pods)
