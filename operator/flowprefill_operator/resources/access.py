"""What the proxy may do in the cluster: read the EndpointSlices of its namespace, for discovery.

Workers need nothing of the API server and get no token.
"""

from __future__ import annotations

from flowprefill_operator.resources.base import Context, Object

RBAC_GROUP = "rbac.authorization.k8s.io"


def service_account(context: Context) -> Object:
    """`<name>-proxy`."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": context.metadata(context.name("proxy"), "proxy"),
        "automountServiceAccountToken": False,
    }


def role(context: Context) -> Object:
    """Reading EndpointSlices; RBAC cannot narrow a list or watch to labels."""
    return {
        "apiVersion": f"{RBAC_GROUP}/v1",
        "kind": "Role",
        "metadata": context.metadata(context.name("proxy"), "proxy"),
        "rules": [
            {
                "apiGroups": ["discovery.k8s.io"],
                "resources": ["endpointslices"],
                "verbs": ["get", "list", "watch"],
            }
        ],
    }


def role_binding(context: Context) -> Object:
    """Gives the role to the proxy's account."""
    name = context.name("proxy")
    return {
        "apiVersion": f"{RBAC_GROUP}/v1",
        "kind": "RoleBinding",
        "metadata": context.metadata(name, "proxy"),
        "roleRef": {"apiGroup": RBAC_GROUP, "kind": "Role", "name": name},
        "subjects": [
            {"kind": "ServiceAccount", "name": name, "namespace": context.service.metadata.namespace}
        ],
    }
