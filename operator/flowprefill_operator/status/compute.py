"""The status of a service as it is written into the cluster."""

from __future__ import annotations

from typing import Any

from flowprefill_crd import Status
from flowprefill_crd.v1alpha1 import (
    AttainmentStatus,
    Condition,
    RevisionStatus,
    RolesStatus,
    RoleStatus,
)
from flowprefill_operator.scene import PROXY
from flowprefill_operator.status.conditions import verdicts
from flowprefill_operator.status.model import resolved_model
from flowprefill_operator.status.pods import LOADING, members, pod_verdict
from flowprefill_operator.status.view import View

ATTAINMENT_WINDOW = "1h"
ATTAINMENT_WINDOW_S = 3600
MESSAGE_LENGTH = 1024


def status_of(view: View) -> Status:
    """The whole status. `lastTransitionTime` is kept where a condition's status stays as it was."""
    before = {} if view.service.status is None else {c.type: c for c in view.service.status.conditions}
    generation = view.service.metadata.generation
    conditions = []
    for name, verdict in verdicts(view).items():
        old = before.get(name)
        same = old is not None and old.status == verdict.status
        conditions.append(
            Condition(
                type=name,
                status=verdict.status,
                reason=verdict.reason,
                message=_shortened(verdict.message),
                observed_generation=generation,
                last_transition_time=old.last_transition_time if old is not None and same else view.now,
            )
        )
    goal = view.goal
    attainment = _attainment(view)
    return Status(
        observed_generation=generation,
        conditions=tuple(conditions),
        revision=_revision(view),
        url=_before(view).url if goal is None else goal.url,
        roles=_roles(view),
        loading_since=_loading_since(view),
        slo_attainment=attainment,
        ttft_summary=_summary(attainment),
        resolved_model=resolved_model(view, _told_of(view)),
        upgrade_available=None if goal is None else goal.target.upgrade,
    )


def as_json(status: Status) -> dict[str, Any]:
    """The status as it is sent: without what is absent."""
    body: dict[str, Any] = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {key: value for key, value in body.items() if value not in ([], {})}


def _before(view: View) -> Status:
    """What was told last: of a spec that is not acted on, the rest still holds."""
    return view.service.status or Status()


def _revision(view: View) -> RevisionStatus | None:
    if view.goal is None:  # not acted on: what serves is what did
        return None if view.service.status is None else view.service.status.revision
    target = view.goal.target.name
    served = (rev for rev in (view.goal.previous, target) if rev in view.reports.proven)
    current = next(served, None)
    return RevisionStatus(current=current, updating=None if current == target else target)


def _told_of(view: View) -> str | None:
    """The revision that pods and model are told of: the one that serves, or that is on its way while none does."""
    return view.serving if view.goal is None else view.goal.previous or view.goal.target.name


def _roles(view: View) -> RolesStatus | None:
    revision = _told_of(view)
    if revision is None:
        return None
    first = "colocated" if (("colocated", revision) in view.scene.deployments) else "prefill"
    proxy = next((rev for (role, rev) in view.scene.deployments if role == PROXY), revision)
    return RolesStatus(
        prefill=_role(view, first, revision),
        decode=None if first == "colocated" else _role(view, "decode", revision),
        proxy=_role(view, PROXY, proxy),
    )


def _role(view: View, role: str, revision: str) -> RoleStatus | None:
    workload = view.scene.workload(role, revision)
    if workload is None:
        return None
    ready = min(workload.ready, workload.replicas)  # those that are to go are still counted by the Deployment
    return RoleStatus(
        replicas=workload.replicas,
        ready_replicas=ready,
        revision=revision,
        summary=f"{ready}/{workload.replicas}",
    )


def _loading_since(view: View) -> str | None:
    """When the earliest of the pods was created that fetch or load the model now."""
    if view.goal is None:
        return None
    target = view.goal.target.name
    loading = [
        pod.since
        for role in ("prefill", "decode", "colocated")
        for item, pod in members(view, role, target)
        if not pod.ready and pod_verdict(item.name, pod).reason in LOADING
    ]
    return min(loading, default=None)


def _attainment(view: View) -> tuple[AttainmentStatus, ...]:
    if view.goal is None:  # pods follow the classes of the spec before
        return _before(view).slo_attainment
    counts = view.reports.attainment
    if counts is None:
        return ()
    return tuple(
        AttainmentStatus(
            name=slo.name,
            ttft_milliseconds=slo.ttft_milliseconds,
            objective=slo.objective,
            attainment=_percent(counts.get(slo.name, (0, 0))),
            window_seconds=ATTAINMENT_WINDOW_S,
        )
        for slo in view.service.spec.slo_classes
    )


def _percent(counts: tuple[int, int]) -> str | None:
    met, missed = counts
    return f"{100 * met / (met + missed):.1f}" if met + missed else None


def _summary(attainment: tuple[AttainmentStatus, ...]) -> str | None:
    parts = [f"{entry.name} {entry.attainment}%" for entry in attainment if entry.attainment is not None]
    return ", ".join(parts) or None


def _shortened(text: str) -> str:
    return text if len(text) <= MESSAGE_LENGTH else f"{text[: MESSAGE_LENGTH - 3]}..."
