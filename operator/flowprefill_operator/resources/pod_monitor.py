"""The PodMonitor, by which Prometheus finds the pods to scrape."""

from __future__ import annotations

from flowprefill_operator import labels
from flowprefill_operator.resources.base import Context, Object

ROLE_META_LABEL = "__meta_kubernetes_pod_label_flowprefill_io_role"
"""How Prometheus's discovery spells the label `flowprefill.io/role` of a pod."""


def pod_monitor(context: Context) -> Object | None:
    """`<name>-pods`: /metrics on the admin port of every serving pod; None when the service wants none.

    Every series gets `service` (the full name), `role` and the pod's revision; where a metric has such a label itself,
    as the proxies' metrics about other pods have, its own stays.
    """
    observability = context.service.spec.observability
    if not observability.pod_monitor:
        return None
    no_profiler = {"key": labels.ROLE, "operator": "NotIn", "values": [labels.PROFILER]}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": context.metadata(context.name("pods"), also=observability.monitor_labels),
        "spec": {
            "selector": {"matchLabels": context.selector(), "matchExpressions": [no_profiler]},
            "podTargetLabels": [labels.REVISION],
            "podMetricsEndpoints": [
                {
                    "port": labels.ADMIN_PORT,
                    "path": "/metrics",
                    "honorLabels": True,
                    "relabelings": [
                        {
                            "action": "replace",
                            "targetLabel": "service",
                            "replacement": context.service.metadata.name,
                        },
                        {"action": "replace", "sourceLabels": [ROLE_META_LABEL], "targetLabel": "role"},
                    ],
                }
            ],
        },
    }
