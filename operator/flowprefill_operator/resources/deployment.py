"""The Deployment of a role."""

from __future__ import annotations

from flowprefill_operator import labels
from flowprefill_operator.labels import Role
from flowprefill_operator.resources.base import Context, Object
from flowprefill_operator.resources.pod import pod_template

OLD_REPLICA_SETS = 2


def deployment(context: Context, role: Role) -> Object:
    """One a revision for workers, so that a revision is replaced as a whole; one for all for the proxy.

    `replicas` is left out where an autoscaler owns it.
    """
    worker = role != "proxy"
    rollout = context.service.spec.rollout
    metadata = context.metadata(context.workload_name(role), role, revision=True)
    if worker:
        metadata["annotations"] = {labels.ROLLOUT: rollout.strategy}
    spec: Object = {
        "revisionHistoryLimit": OLD_REPLICA_SETS,
        "progressDeadlineSeconds": rollout.timeout_seconds,
        "selector": {"matchLabels": context.selector(role, revision=worker)},
        "strategy": _strategy(surge=not worker or rollout.strategy == "Surge"),
        "template": pod_template(context, role),
    }
    role_spec = context.spec_of(role)
    if role_spec.autoscaling is None:
        spec["replicas"] = role_spec.initial_replicas
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def _strategy(*, surge: bool) -> Object:
    if not surge:
        return {"type": "Recreate"}
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
