"""What scales a role's pods: always the operator's own object, aimed at the live revision."""

from __future__ import annotations

from flowprefill_operator.labels import Role
from flowprefill_operator.resources.base import Context, Object

LOAD_WINDOW = "1m"
"""Over how long a load is averaged."""


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
                "name": context.scale_target(role),
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


def scaled_object(context: Context, role: Role) -> Object | None:
    """KEDA's ScaledObject on the role's own load; None unless the role asks for it.

    The query gives the load in pods' worth of work, so that load over threshold is the number of pods wanted.
    """
    scaling = context.spec_of(role).autoscaling
    if scaling is None or scaling.provider != "Keda":
        return None
    assert scaling.prometheus_address is not None, "the API asks for an address with this provider"
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": context.metadata(context.name(role), role),
        "spec": {
            "scaleTargetRef": {"name": context.scale_target(role)},
            "minReplicaCount": scaling.min_replicas,
            "maxReplicaCount": scaling.max_replicas,
            "advanced": {
                "horizontalPodAutoscalerConfig": {
                    "behavior": {
                        "scaleDown": {"stabilizationWindowSeconds": scaling.scale_down_stabilization_seconds}
                    }
                }
            },
            "triggers": [
                {
                    "type": "prometheus",
                    "metricType": "AverageValue",
                    "metadata": {
                        "serverAddress": scaling.prometheus_address,
                        "query": load_query(context, role),
                        "threshold": f"{scaling.target_utilization_percent / 100:g}",
                    },
                }
            ],
        },
    }


def load_query(context: Context, role: Role) -> str:
    """The role's load in PromQL, in pods: time spent in prefill or in the proxy's own work, a second a second; for
    decode the share of its batch slots in use."""
    meta = context.service.metadata
    match role:
        case "prefill" | "colocated":
            metric = "flowprefill_prefill_seconds_sum"
        case "proxy":
            metric = "flowprefill_router_overhead_seconds_sum"
        case "decode":
            slots = context.service.spec.decode.max_batch_size
            series = f'flowprefill_decode_sequences{{namespace="{meta.namespace}",service="{meta.name}"}}'
            return f"sum({series}) / {slots}"
    return f'sum(rate({metric}{{namespace="{meta.namespace}",service="{meta.name}"}}[{LOAD_WINDOW}]))'
