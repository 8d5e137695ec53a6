"""Which changes of a spec need new pods: the hash that names a revision."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from flowprefill_crd.v1alpha1.service import FlowPrefillService

LIVE: tuple[str, ...] = (
    "model.cache.persistentVolumeClaim.retain",
    "sloClasses",
    "scheduling.policy",
    "scheduling.batchTokenBudget",
    "scheduling.preemption",
    "scheduling.chunkTokens",
    "scheduling.maxSuspended",
    "scheduling.recomputeSuspendedUnderPressure",
    "scheduling.queueLimit",
    "scheduling.ageing",
    "scheduling.predictor.onlineCorrection",
    "prefill.replicas",
    "prefill.autoscaling",
    "decode.replicas",
    "decode.autoscaling",
    "proxy.replicas",
    "proxy.autoscaling",
    "proxy.httpRoute",
    "rollout",
    "upgradePolicy",
    "observability.podMonitor",
    "observability.prometheusRule",
    "observability.monitorLabels",
    "observability.logLevel",
    "observability.perRequestLog",
    "paused",
)
"""Paths in the spec whose change leaves running pods alone. Everything else starts a new revision."""


def restart_hash(service: FlowPrefillService) -> str:
    """Ten hex digits that change exactly when a change of the spec needs new pods.

    Fields at their default do not count, so a spec has the same hash before and after the API server
    fills defaults in, and after a new optional field joins the API.
    """
    body = service.spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    for path in LIVE:
        _remove(body, path.split("."))
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _remove(body: dict[str, Any], path: list[str]) -> None:
    """Take the field at the path out, and the objects that are empty without it."""
    first, *rest = path
    if first not in body:
        return
    if rest:
        _remove(body[first], rest)
        if body[first]:
            return
    del body[first]
