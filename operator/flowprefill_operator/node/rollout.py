"""Which pods to start and which to stop. Pure; called after every change.

1. A group short of pods gets them at once. With `recreate`, only when no pod of an outdated group with the same role
   class (workers) is left, not even a stopping one.
2. A group with too many pods loses the ones that are not ready first, then the youngest.
3. Outdated pods go at once with `recreate`; otherwise when every wanted group is complete and ready, so that a
   revision that never gets ready leaves the old one serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowprefill_operator.node.desired import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """A pod as the decision sees it; pods come in the order of their age, oldest first."""

    name: str
    group: tuple[str, str]
    role: str
    ready: bool
    terminating: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`start` names a group once for each pod to start, `stop` names pods."""

    start: tuple[tuple[str, str], ...] = ()
    stop: tuple[str, ...] = ()


def decide(groups: Sequence[Group], pods: Sequence[PodView]) -> Decision:
    """The next step towards exactly `replicas` ready pods of each group and no others."""
    wanted = {group.key for group in groups}
    recreate = any(group.recreate for group in groups)
    outdated = [pod for pod in pods if pod.group not in wanted]
    # A proxy needs no accelerator, so it is always replaced without a gap.
    in_the_way = recreate and any(pod.role != "proxy" for pod in outdated)

    start: list[tuple[str, str]] = []
    stop: list[str] = []
    complete = True
    for group in groups:
        members = [pod for pod in pods if pod.group == group.key and not pod.terminating]
        complete = complete and sum(pod.ready for pod in members) >= group.replicas
        if len(members) < group.replicas and not (group.recreate and in_the_way):
            start += [group.key] * (group.replicas - len(members))
        if len(members) > group.replicas:
            youngest_first = members[::-1]
            expendable = sorted(youngest_first, key=lambda pod: pod.ready)
            stop += [pod.name for pod in expendable[: len(members) - group.replicas]]
    stop += [
        pod.name
        for pod in outdated
        if not pod.terminating and (complete or (recreate and pod.role != "proxy"))
    ]
    return Decision(start=tuple(start), stop=tuple(stop))
