"""What the API accepts and this release does not serve."""

from __future__ import annotations

from flowprefill_crd import FlowPrefillService

MULTI_NODE = "MultiNodeUnsupported"
"""Reason of the condition of a service whose roles span nodes."""


def unsupported(service: FlowPrefillService) -> tuple[str, str] | None:
    """Reason and message when the service asks for what no pods can be planned for; None when all of it can be."""
    spec = service.spec
    roles = {"prefill": spec.prefill.nodes}
    if spec.mode == "Disaggregated":
        roles["decode"] = spec.decode.nodes
    wide = [f"spec.{role}.nodes is {nodes}" for role, nodes in roles.items() if nodes > 1]
    if not wide:
        return None
    return (
        MULTI_NODE,
        f"{' and '.join(wide)}; this release serves roles whose pods each stay on one node, use 1",
    )
