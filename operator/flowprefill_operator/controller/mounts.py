"""Volumes that pods wait for. A pod's status does not tell them: a missing Secret is told by an Event of the kubelet alone.

Only pods that have been starting for a while are asked about, and each not too often.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from datetime import UTC, datetime

from flowprefill_operator.cluster.client import Cluster
from flowprefill_operator.cluster.errors import ClusterError, Forbidden
from flowprefill_operator.kinds import EVENTS
from flowprefill_operator.observe.observed import Observed, Pod

log = logging.getLogger(__name__)

PATIENCE_S = 8.0
"""How long a pod may be starting before it is asked about."""

EVERY_S = 15.0
AT_MOST = 4
"""Pods of one service asked about in one pass."""


class Mounts:
    """What is known of volumes that could not be mounted, by uid of the pod. Event-loop thread only."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[str, tuple[float, str | None]] = {}
        self.forbidden: frozenset[tuple[str, str]] = frozenset()
        """What the last look was refused for want of a right, as (verb, resource)."""

    async def unmounted(self, pods: Iterable[tuple[Observed, Pod]]) -> tuple[dict[str, str], float | None]:
        """Messages by pod name, and after how many seconds to look again (None while no pod is starting)."""
        starting = [(item, pod) for item, pod in pods if _starting(pod)]
        now_s = time.monotonic()
        due = [item for item, pod in starting if _age_s(pod.since) >= PATIENCE_S]
        for item in [i for i in due if self._known.get(i.uid, (-EVERY_S, None))[0] + EVERY_S <= now_s][
            :AT_MOST
        ]:
            self._known[item.uid] = (now_s, await self._message(item))
        found = {item.name: text for item in due if (text := self._known.get(item.uid, (0.0, None))[1])}
        return found, PATIENCE_S if starting else None

    def keep_only(self, uids: set[str]) -> None:
        """Forget pods that are gone."""
        self._known = {uid: known for uid, known in self._known.items() if uid in uids}

    async def _message(self, item: Observed) -> str | None:
        selector = f"regarding.kind=Pod,regarding.name={item.name},reason=FailedMount"
        try:
            events, _ = await self._cluster.list(EVENTS, namespace=item.namespace, fields=selector)
            self.forbidden = frozenset()
        except Forbidden as error:
            self.forbidden = frozenset({(error.verb, error.resource)})
            return None
        except ClusterError as error:
            log.debug("events cannot be read", extra={"reason": str(error)})
            return None
        return str(events[-1].get("note") or "") or None if events else None


def _starting(pod: Pod) -> bool:
    """Whether a pod has a node and none of its containers has come to run."""
    idle = all(c.waiting is not None and c.waiting[0] in _IDLE for c in pod.containers)
    return pod.phase == "Pending" and pod.unschedulable is None and not pod.terminating and idle


_IDLE = frozenset({"ContainerCreating", "PodInitializing"})


def _age_s(since: str) -> float:
    try:
        began = datetime.fromisoformat(since)
    except ValueError:
        return 0.0
    return (datetime.now(UTC) - began).total_seconds()
