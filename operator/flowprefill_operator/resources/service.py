"""The Services: one that clients use, and one for each worker Deployment that discovery reads."""

from __future__ import annotations

from flowprefill_operator import labels
from flowprefill_operator.labels import Role
from flowprefill_operator.resources.base import Context, Object
from flowprefill_operator.resources.pod import ports


def proxy_service(context: Context) -> Object:
    """`<name>-proxy`: the stable address of the OpenAI API. Admin ports are not in it."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": context.metadata(context.name("proxy"), "proxy"),
        "spec": {
            "type": "ClusterIP",
            "selector": context.selector("proxy"),
            "ports": [
                {
                    "name": labels.API_PORT,
                    "port": context.service_port,
                    "targetPort": labels.API_PORT,
                    "protocol": "TCP",
                }
            ],
        },
    }


def url(context: Context) -> str:
    """Base URL of the OpenAI API for clients in the cluster."""
    namespace = context.service.metadata.namespace
    return f"http://{context.name('proxy')}.{namespace}.svc:{context.service_port}/v1"


def headless_service(context: Context, role: Role) -> Object:
    """`<name>-<role>-<rev>`: its EndpointSlices, labelled with role and revision, are what proxies watch."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": context.metadata(context.workload_name(role), role, revision=True),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "selector": context.selector(role, revision=True),
            "ports": [
                {"name": name, "port": port, "targetPort": name, "protocol": "TCP"}
                for name, port in ports(context, role).items()
            ],
        },
    }
