"""What the API accepts and this release does not serve."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flowprefill_crd import FlowPrefillService
from flowprefill_operator.fitting import role_of
from flowprefill_operator.kinds import DEPLOYMENTS, kind_of
from flowprefill_operator.resources.base import Object
from flowprefill_operator.resources.pod import container_name

MULTI_NODE = "MultiNodeUnsupported"
"""Reason of the condition of a service whose roles span nodes."""

PROFILING = "ProfilingJobUnsupported"
"""Reason of the condition of a service that asks for a Job which its engine has none for."""

INVALID_TEMPLATE = "InvalidPodTemplate"
"""Reason of the condition of a service whose pods cannot be as the spec changes them."""


def unsupported(service: FlowPrefillService) -> tuple[str, str] | None:
    """Reason and message when the service asks for what no pods can be planned for; None when all of it can be."""
    spec = service.spec
    roles = {"prefill": spec.prefill.nodes}
    if spec.mode == "Disaggregated":
        roles["decode"] = spec.decode.nodes
    wide = [f"spec.{role}.nodes is {nodes}" for role, nodes in roles.items() if nodes > 1]
    if wide:
        return (
            MULTI_NODE,
            f"{' and '.join(wide)}; this release serves roles whose pods each stay on one node, use 1",
        )
    if spec.engine.type == "vllm" and spec.scheduling.predictor.profiling_job:
        message = (
            "spec.scheduling.predictor.profilingJob is true and spec.engine.type is vllm, whose pods each measure "
            "for themselves at their start; use false"
        )
        return PROFILING, message
    return None


def lost_container(planned: Iterable[Object]) -> tuple[str, str] | None:
    """Reason and message when a role's podTemplate has taken its own container away (by `$patch`); None when all have theirs."""
    for item in planned:
        if kind_of(item) != DEPLOYMENTS:
            continue
        role: Any = role_of(item)
        spec: Any = item["spec"]  # Any: what a user's patch has left
        containers = spec["template"]["spec"].get("containers") or ()
        names = [container.get("name") for container in containers]
        wanted = container_name(role)
        if wanted not in names:
            return (
                INVALID_TEMPLATE,
                f"podTemplate leaves the {role} pods with containers {names}; there must be one named {wanted}",
            )
    return None
