"""From a service to the objects that make it. Pure and deterministic: no clock, no I/O.

The operator applies these objects to a cluster; the local node runs their pods as processes of one machine.
"""

from __future__ import annotations

from flowprefill_crd import FlowPrefillService
from flowprefill_operator.resources import access, config_map, network_policy, service
from flowprefill_operator.resources.autoscaler import horizontal_pod_autoscaler, scaled_object
from flowprefill_operator.resources.base import Context, Object
from flowprefill_operator.resources.deployment import deployment
from flowprefill_operator.resources.disruption_budget import disruption_budget
from flowprefill_operator.resources.http_route import http_route
from flowprefill_operator.resources.pod_monitor import pod_monitor
from flowprefill_operator.resources.profile import profiler_config
from flowprefill_operator.resources.profiling import profiling_job
from flowprefill_operator.resources.volume_claim import model_cache_claim
from flowprefill_operator.settings import PlanSettings

__all__ = ["Object", "plan"]


def plan(
    fps: FlowPrefillService,
    settings: PlanSettings,
    *,
    revision: str | None = None,
    scaled_revision: str | None = None,
    proxies_port: int | None = None,
) -> tuple[Object, ...]:
    """All objects of one revision of the service, in an order in which they can be applied.

    What pods refer to (configuration, accounts, claims, policies) comes before the pods. A change that running pods
    take over live changes no pod template. `revision` names the revision (the hash of the restart-relevant spec when
    left out), `scaled_revision` the one that autoscalers aim at while another one serves, and
    `proxies_port` the API port of the proxies of that one while they stay.
    """
    context = Context(fps, settings, revision, scaled_revision, proxies_port)
    planned: list[Object | None] = [
        config_map.revision_config(context),
        config_map.live_document(context),
        access.service_account(context),
        access.role(context),
        access.role_binding(context),
        model_cache_claim(context),
        profiler_config(context),
    ]
    if settings.network_policy:
        planned += [network_policy.proxy_policy(context), network_policy.worker_policy(context)]
        planned.append(network_policy.kv_policy(context))
    planned.append(service.proxy_service(context))
    planned += [service.headless_service(context, role) for role in context.worker_roles]
    planned.append(profiling_job(context))
    planned += [deployment(context, role) for role in context.roles]
    planned += [disruption_budget(context, role) for role in context.roles]
    planned += [horizontal_pod_autoscaler(context, role) for role in context.roles]
    planned += [scaled_object(context, role) for role in context.roles]
    planned += [pod_monitor(context), http_route(context)]
    return tuple(item for item in planned if item is not None)
