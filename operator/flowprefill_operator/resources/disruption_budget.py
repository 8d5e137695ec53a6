"""The PodDisruptionBudget of a role."""

from __future__ import annotations

from flowprefill_operator.labels import Role
from flowprefill_operator.resources.base import Context, Object


def disruption_budget(context: Context, role: Role) -> Object | None:
    """At most one pod of the role leaves at a time; None for a role that never has two."""
    if context.spec_of(role).most_replicas < 2:
        return None
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": context.metadata(context.name(role), role),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": context.selector(role)},
        },
    }
