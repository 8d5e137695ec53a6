"""The conditions of a service: a tree whose root, Ready, is the first branch that does not hold.

Ready        everything that this generation of the spec asks for is in place, and has served a token
Available    requests are served, by this revision or by the one it replaces
Accepted, ObjectsApplied, ProfileReady, PrefillReady, DecodeReady, ProxyReady, RolloutComplete, ConfigApplied: Ready's branches
Reconciling, Stalled: present while true, as kstatus (sigs.k8s.io/cli-utils) reads them; neither when it is as asked for
A part that the service does not have has no condition.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

from flowprefill_operator import labels
from flowprefill_operator.kinds import CONFIG_MAPS, kind_of
from flowprefill_operator.observe.observed import Job, Observed, Pod, Scaler
from flowprefill_operator.revisions import key_of
from flowprefill_operator.rollout import Goal
from flowprefill_operator.scene import PROXY, WORKER_ROLES
from flowprefill_operator.status.failures import of_failure
from flowprefill_operator.status.pods import role_verdict
from flowprefill_operator.status.verdict import Verdict, asked_for, holds, pending, stalled
from flowprefill_operator.status.view import View

OTHERS = 5
"""Further objects that are named beside the first that could not be applied."""

CONDITION_OF = {
    "prefill": "PrefillReady",
    "colocated": "PrefillReady",
    "decode": "DecodeReady",
    "proxy": "ProxyReady",
}

BRANCHES = (
    "Accepted",
    "ObjectsApplied",
    "ProfileReady",
    "PrefillReady",
    "DecodeReady",
    "ProxyReady",
    "RolloutComplete",
    "ConfigApplied",
)


def verdicts(view: View) -> dict[str, Verdict]:
    """Every condition by type, in the order in which they are written."""
    found: dict[str, Verdict] = {"Accepted": _accepted(view)}
    if view.schema_outdated:
        found["SchemaCurrent"] = stalled(
            "CRDOutdated",
            "the cluster's CustomResourceDefinition is of another release than the operator; upgrade it with the chart "
            "(crds.create) or by kubectl apply --server-side",
        )
    if view.goal is not None:
        found["ObjectsApplied"] = _objects_applied(view)
        found |= _profile_ready(view, view.goal)
        for role in (*_worker_roles(view), PROXY):
            found[CONDITION_OF[role]] = role_verdict(view, role, _revision_of(view, role, view.goal))
        found["RolloutComplete"] = _rollout_complete(view, view.goal)
        found["ConfigApplied"] = _config_applied(view)
        found |= _extras(view)
    found["Available"] = _available(view)
    ready = _ready(found)
    if ready.status != "True" and not ready.asked_for:
        found["Stalled" if ready.stalled else "Reconciling"] = holds(ready.reason, ready.message)
    return {"Ready": ready} | found


def _ready(found: Mapping[str, Verdict]) -> Verdict:
    """The first branch that does not hold: one that needs somebody before one that takes its time."""
    open_branches = [
        (name, found[name]) for name in BRANCHES if name in found and found[name].status != "True"
    ]
    if not open_branches:
        return holds("Serving", "one token has been served through the service as it is specified")
    name, first = next(((n, v) for n, v in open_branches if v.stalled), open_branches[0])
    asked = next(((n, v) for n, v in open_branches if v.asked_for), None)
    if asked is not None and not first.stalled:
        name, first = asked
    return replace(first, message=f"{name}: {first.message}")


def _accepted(view: View) -> Verdict:
    if view.refusal is not None:
        reason, message = view.refusal
        left = "; what runs is left as it is, and not mended, until the spec is acted on"
        return stalled(reason, message + (left if view.scene.deployments else ""))
    if view.service.spec.paused:
        return holds("Valid", "the spec is acted on once spec.paused is no longer true")
    return holds("Valid", "the spec is acted on")


def _objects_applied(view: View) -> Verdict:
    if view.service.spec.paused:
        return asked_for("Paused", "spec.paused is true; the cluster is left as it is", status="Unknown")
    if view.forbidden:
        verb, resource = view.forbidden[0]
        return stalled("Forbidden", f"the operator may not {verb} {resource}; grant it, as the chart does")
    if view.applied is None:
        return Verdict(status="Unknown", reason="Pending", message="nothing has been applied yet")
    if view.applied.failures:
        first, *more = view.applied.failures
        verdict = of_failure(first)
        others = ", ".join(f"{failure.kind.kind} {failure.name}" for failure in more[:OTHERS])
        rest = f"; also {others}{', ...' if len(more) > OTHERS else ''}" if more else ""
        return replace(verdict, message=verdict.message + rest)
    missing = next((verdict for _, verdict in _absent(view)), None)
    return missing or holds("Applied", "every object is as planned")


def _profile_ready(view: View, goal: Goal) -> dict[str, Verdict]:
    """Of a service that asks for a profiling Job."""
    if not view.service.spec.scheduling.predictor.profiling_job:
        return {}
    if not goal.unprofiled:
        return {"ProfileReady": holds("Profiled", "prefill pods start with the profile of the Job")}
    for item in view.scene.objects.values():
        if isinstance(item.detail, Job) and item.detail.failed is not None:
            return {"ProfileReady": stalled("ProfilingFailed", f"Job {item.name}: {item.detail.failed}")}
    return {"ProfileReady": pending("Profiling", "the profiling Job has not finished")}


def _rollout_complete(view: View, goal: Goal) -> Verdict:
    stuck = _deadline_exceeded(view, goal.target.name)
    if stuck is not None and (goal.previous is not None or goal.serving != goal.target.name):
        rest = f"; revision {goal.previous} keeps serving" if goal.previous is not None else ""
        return stalled("RolloutStuck", f"revision {goal.target.name}: {stuck}{rest}")
    if goal.previous is not None:
        if view.service.spec.paused:
            text = f"revision {goal.target.name} replaces {goal.previous} once spec.paused is no longer true"
            return asked_for("Paused", text)
        return pending("RollingOut", f"revision {goal.target.name} replaces {goal.previous}")
    if _asleep(view, goal.target.name):
        return asked_for("ScaledToZero", NOBODY_SERVES)
    if goal.target.name in view.reports.proven:
        return holds("Complete", f"revision {goal.target.name} serves")
    if view.reports.unproven is not None and goal.to_prove:
        return pending("RoundTripFailed", f"no token has been served yet: {view.reports.unproven}")
    return pending("RoundTripPending", "no token has been served through prefill and decode yet")


NOBODY_SERVES = "the spec asks for no pods of a role, so nothing is served"


def _deadline_exceeded(view: View, revision: str) -> str | None:
    for role in (*WORKER_ROLES, PROXY):
        workload = view.scene.workload(role, revision)
        progressing = None if workload is None else workload.conditions.get("Progressing")
        if progressing is not None and progressing[1] == "ProgressDeadlineExceeded":
            return progressing[2]
    return None


def _asleep(view: View, revision: str) -> bool:
    states = (view.scene.workload(role, revision) for role in (*_worker_roles(view), PROXY))
    return any(state is not None and state.replicas == 0 for state in states)


def _config_applied(view: View) -> Verdict:
    wanted = live_generation(view)
    if wanted is None:
        return pending("Pending", "there is no live configuration yet")
    behind = [item.name for item, pod in running(view) if view.reports.generations.get(item.name) != wanted]
    if not any(pod.role in WORKER_ROLES for _, pod in running(view)):
        return pending("Pending", "no worker is ready to follow the live configuration")
    if not behind:
        return holds("InUse", f"all pods follow live configuration {wanted}")
    return pending(
        "Pending",
        f"not all pods follow live configuration {wanted} yet: {', '.join(behind[:5])}",
    )


def live_generation(view: View) -> int | None:
    """The generation in the live document as it is in the cluster."""
    for item in view.scene.objects.values():
        if item.kind == CONFIG_MAPS and labels.LIVE_KEY in item.data:
            try:
                return int(json.loads(item.data[labels.LIVE_KEY])["generation"])
            except (ValueError, KeyError, TypeError):
                return None
    return None


def running(view: View) -> list[tuple[Observed, Pod]]:
    """Ready pods that are to stay."""
    return [(item, pod) for item, pod in view.scene.pods if pod.ready and not pod.terminating and pod.ip]


def _available(view: View) -> Verdict:
    proxies = [pod for _, pod in running(view) if pod.role == PROXY]
    serving = view.serving
    if serving is None:
        if view.goal is not None and _asleep(view, view.goal.target.name):
            return asked_for("ScaledToZero", NOBODY_SERVES)
        return Verdict(status="False", reason="NoPods", message="no revision has a ready pod in each role")
    if not proxies:
        return Verdict(status="False", reason="NoProxy", message="no proxy is ready")
    if not any(
        kind.kind == "Service" and item.labels.get(labels.ROLE) == PROXY
        for (kind, _), item in view.scene.objects.items()
    ):
        return Verdict(status="False", reason="NoProxy", message="the proxies have no Service")
    workers = {rev for (role, rev) in view.scene.deployments if role in WORKER_ROLES}
    if not any(rev in view.reports.proven and view.scene.serves(rev) for rev in workers):
        return Verdict(status="False", reason="RoundTripPending", message="no token has been served yet")
    return holds("Serving", f"revision {serving} serves")


def _extras(view: View) -> dict[str, Verdict]:
    """Objects of other projects' APIs that are not there, and autoscalers that do not scale."""
    found: dict[str, Verdict] = {}
    for known in view.scene.objects.values():
        if isinstance(known.detail, Scaler) and known.detail.idle is not None:
            reason, message = known.detail.idle
            text = f"{known.kind.kind} {known.name}: {message}"
            found["AutoscalingReady"] = Verdict(status="False", reason=reason, message=text)
    return found | dict(_absent(view))


def _absent(view: View) -> Iterator[tuple[str, Verdict]]:
    """Objects that the spec asks for and whose API the cluster lacks, by the condition that tells of them."""
    for item in () if view.applied is None else view.applied.absent:
        kind = kind_of(item)
        about = {"ScaledObject": "AutoscalingReady", "HTTPRoute": "RouteReady"}.get(kind.kind)
        if about is not None:
            text = f"{kind.kind} {key_of(item)[1]} is asked for, and the cluster has no {kind.resource}"
            yield about, stalled("CRDNotInstalled", text)


def _worker_roles(view: View) -> tuple[str, ...]:
    return ("colocated",) if view.service.spec.mode == "Colocated" else ("prefill", "decode")


def _revision_of(view: View, role: str, goal: Goal) -> str:
    """The revision whose pods a role's condition is about: the target's, but proxies are replaced last, and while the
    service is paused nothing is."""
    if (role, goal.target.name) in view.scene.deployments:
        return goal.target.name
    if role != PROXY:
        paused = view.service.spec.paused and goal.previous is not None
        return str(goal.previous) if paused else goal.target.name
    return next((rev for (name, rev) in view.scene.deployments if name == PROXY), goal.target.name)
