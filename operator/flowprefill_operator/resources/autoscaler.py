"""What scales a role's pods: always the operator's own object, aimed at the live revision."""

from __future__ import annotations

from flowprefill_operator.labels import Role
from flowprefill_operator.resources.base import Context, Object


def horizontal_pod_autoscaler(context: Context, role: Role) -> Object | None:
    """Keeps the pods' use of their requested CPU at the target; None unless the role asks for it.

    Its name stays over revisions; only its target moves.
    """
    scaling = context.spec_of(role).autoscaling
    if scaling is None or scaling.provider != "HorizontalPodAutoscaler":
        return None
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": context.metadata(context.name(role), role),
        "spec": {
            "scaleTargetRef": {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "name": context.workload_name(role),
            },
            "minReplicas": scaling.min_replicas,
            "maxReplicas": scaling.max_replicas,
            "metrics": [
                {
                    "type": "Resource",
                    "resource": {
                        "name": "cpu",
                        "target": {
                            "type": "Utilization",
                            "averageUtilization": scaling.target_utilization_percent,
                        },
                    },
                }
            ],
            "behavior": {
                "scaleDown": {"stabilizationWindowSeconds": scaling.scale_down_stabilization_seconds}
            },
        },
    }
