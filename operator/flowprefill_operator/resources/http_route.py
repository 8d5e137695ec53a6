"""The HTTPRoute of the Gateway API, from Gateways to the proxies."""

from __future__ import annotations

from flowprefill_operator.resources.base import Context, Object

TIMEOUT_MARGIN_S = 60
"""For receiving the request, which the proxy's own limit does not count; the proxy then gives up before the gateway."""


def http_route(context: Context) -> Object | None:
    """`<name>-proxy`; None unless the service asks for it.

    It sets a timeout, because gateways cut a stream after a default of their own, 15 s with some.
    """
    proxy = context.service.spec.proxy
    route = proxy.http_route
    if route is None:
        return None
    spec: Object = {
        "parentRefs": [
            parent.model_dump(mode="json", by_alias=True, exclude_none=True) for parent in route.parent_refs
        ],
        "rules": [
            {
                "backendRefs": [{"name": context.name("proxy"), "port": context.service_port}],
                "timeouts": {"request": f"{proxy.request_timeout_seconds + TIMEOUT_MARGIN_S}s"},
            }
        ],
    }
    if route.hostnames:
        spec["hostnames"] = list(route.hostnames)
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": context.metadata(context.name("proxy"), "proxy"),
        "spec": spec,
    }
