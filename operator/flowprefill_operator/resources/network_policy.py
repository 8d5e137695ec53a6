"""Who may open which port of the pods."""

from __future__ import annotations

from flowprefill_operator import labels
from flowprefill_operator.resources.base import Context, Object
from flowprefill_operator.resources.pod import ports

NAMESPACE_NAME = "kubernetes.io/metadata.name"


def proxy_policy(context: Context) -> Object:
    """The API for everybody; the admin port for the service's own proxies, the operator and Prometheus."""
    number = ports(context, "proxy")
    return _policy(
        context,
        "proxy",
        {"matchLabels": context.selector("proxy")},
        [
            {"ports": [_port(number[labels.API_PORT])]},
            {"ports": [_port(number[labels.ADMIN_PORT])], "from": _admin_peers(context)},
        ],
    )


def worker_policy(context: Context) -> Object:
    """The API for the proxies alone, KV blocks for the service's own decode pods, the admin port as above."""
    number = ports(context, context.worker_roles[0])
    rules: list[object] = [
        {"ports": [_port(number[labels.API_PORT])], "from": [_pods(context.selector("proxy"))]},
        {"ports": [_port(number[labels.ADMIN_PORT])], "from": _admin_peers(context)},
    ]
    if labels.KV_PORT in number:
        rules.append({"ports": [_port(number[labels.KV_PORT])], "from": [_pods(context.selector("decode"))]})
    roles = {"key": labels.ROLE, "operator": "In", "values": list(context.worker_roles)}
    return _policy(
        context, "workers", {"matchLabels": context.selector(), "matchExpressions": [roles]}, rules
    )


def _policy(context: Context, suffix: str, selector: Object, ingress: list[object]) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": context.metadata(context.name(suffix)),
        "spec": {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def _admin_peers(context: Context) -> list[object]:
    namespaces = context.settings.admin_namespaces
    if namespaces is None:
        return [_pods(context.selector()), {"namespaceSelector": {}}]
    if not namespaces:
        return [_pods(context.selector())]
    named = {"key": NAMESPACE_NAME, "operator": "In", "values": list(namespaces)}
    return [_pods(context.selector()), {"namespaceSelector": {"matchExpressions": [named]}}]


def _pods(match_labels: dict[str, str]) -> Object:
    return {"podSelector": {"matchLabels": match_labels}}


def _port(number: int) -> Object:
    return {"protocol": "TCP", "port": number}
