"""Who may open which port of the pods. Policies that select one pod add up: what none of them allows is closed."""

from __future__ import annotations

from flowprefill_operator import labels
from flowprefill_operator.resources import vllm
from flowprefill_operator.resources.base import Context, Object

NAMESPACE_NAME = "kubernetes.io/metadata.name"


def proxy_policy(context: Context) -> Object:
    """`<name>-proxy`: the API for everybody; the admin port for the service's own pods, the operator and Prometheus."""
    return _policy(
        context.metadata(context.name("proxy"), "proxy"),
        {"matchLabels": context.selector("proxy")},
        [
            {"ports": [_port(labels.API_PORT)]},
            {"ports": [_port(labels.ADMIN_PORT)], "from": _admin_peers(context)},
        ],
    )


def worker_policy(context: Context) -> Object:
    """`<name>-workers`: the API for the proxies alone, the admin port as above, in all pods that are no proxies."""
    no_proxy = {"key": labels.ROLE, "operator": "NotIn", "values": ["proxy"]}
    return _policy(
        context.metadata(context.name("workers")),
        {"matchLabels": context.selector(), "matchExpressions": [no_proxy]},
        [
            {"ports": [_port(labels.API_PORT)], "from": [_pods(context.selector("proxy"))]},
            {"ports": [_port(labels.ADMIN_PORT)], "from": _admin_peers(context)},
        ],
    )


def kv_policy(context: Context) -> Object | None:
    """`<name>-kv-<rev>`: KV blocks of a revision's prefill pods, for decode pods of the same revision alone.

    One for each revision, so that it stays as it is while its pods live. None where prefill pods decode too.
    """
    if context.service.spec.mode == "Colocated":
        return None
    decode = _pods(context.selector("decode", revision=True))
    return _policy(
        context.metadata(context.name("kv", context.revision), "prefill", revision=True),
        {"matchLabels": context.selector("prefill", revision=True)},
        [{"ports": [_port(labels.KV_PORT), *vllm.transfer_ports(context)], "from": [decode]}],
    )


def _policy(metadata: Object, selector: Object, ingress: list[object]) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata,
        "spec": {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def _admin_peers(context: Context) -> list[object]:
    settings = context.settings
    peers: list[object] = [_pods(context.selector())]
    if settings.monitoring_from is None:
        return [*peers, {"namespaceSelector": {}}]
    if settings.operator_namespace is not None:
        peers.append({"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: settings.operator_namespace}}})
    return [*peers, *settings.monitoring_from]


def _pods(match_labels: dict[str, str]) -> Object:
    return {"podSelector": {"matchLabels": match_labels}}


def _port(name: str) -> Object:
    """A port by its name: each pod's own number, also while pods of two revisions have different ones."""
    return {"protocol": "TCP", "port": name}
