"""The API of FlowPrefill: the FlowPrefillService, and the two documents that its pods read.

Needs pydantic and PyYAML only; the operator, the proxy and the command line all import it.
"""

from flowprefill_crd.errors import InvalidConfig, InvalidDocument, InvalidService, Problem
from flowprefill_crd.parse import load_services, parse_service, parse_services
from flowprefill_crd.podconfig import (
    LiveConfig,
    LiveSloClass,
    PodConfig,
    live_config,
    pod_config,
)
from flowprefill_crd.revision import restart_hash
from flowprefill_crd.v1alpha1 import FlowPrefillService, Scheduling, SloClass, Spec, Status

__all__ = [
    "FlowPrefillService",
    "InvalidConfig",
    "InvalidDocument",
    "InvalidService",
    "LiveConfig",
    "LiveSloClass",
    "PodConfig",
    "Problem",
    "Scheduling",
    "SloClass",
    "Spec",
    "Status",
    "live_config",
    "load_services",
    "parse_service",
    "parse_services",
    "pod_config",
    "restart_hash",
]
