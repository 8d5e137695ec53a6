"""Planned objects, fitted to what is in the cluster. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from flowprefill_crd import FlowPrefillService
from flowprefill_operator import labels
from flowprefill_operator.kinds import DEPLOYMENTS, kind_of
from flowprefill_operator.observe.observed import Observed, Workload
from flowprefill_operator.resources.base import Object
from flowprefill_operator.revisions import Revision, key_of
from flowprefill_operator.scene import PROXY, Scene


def role_of(item: Object) -> str:
    meta = item["metadata"]
    assert isinstance(meta, Mapping)
    return str(meta["labels"].get(labels.ROLE, ""))


def with_replicas(item: Object, service: FlowPrefillService, now: Scene, previous: str | None) -> Object:
    """A Deployment that an autoscaler owns starts with as many pods as the one that it replaces has."""
    if kind_of(item) != DEPLOYMENTS:
        return item
    spec, role = item["spec"], role_of(item)
    assert isinstance(spec, Mapping)
    if "replicas" in spec or key_of(item) in now.objects:
        return item
    before = None if previous is None else now.workload(role, previous)
    replicas = _within(service, role, before.replicas if before is not None else 0)
    return {**item, "spec": {**spec, "replicas": replicas}}


def _within(service: FlowPrefillService, role: str, replicas: int) -> int:
    """A number of pods, within the bounds of the role's autoscaler."""
    part = {"decode": service.spec.decode, PROXY: service.spec.proxy}.get(role, service.spec.prefill)
    scaling = part.autoscaling
    assert scaling is not None, "only an autoscaler's Deployment is planned without replicas"
    return min(max(replicas, scaling.min_replicas), scaling.max_replicas)


def api_port(revision: Revision | None) -> int | None:
    """The API port of a revision's proxies; None when it has none on record."""
    for key, item in () if revision is None else revision.objects.items():
        if key[0] == DEPLOYMENTS and role_of(item) == PROXY:
            spec: Any = item["spec"]  # Any: what a release has recorded
            containers = spec["template"]["spec"]["containers"]
            ports = (port for container in containers for port in container.get("ports", ()))
            return next((p["containerPort"] for p in ports if p.get("name") == labels.API_PORT), None)
    return None


def hand_over(wanted: Iterable[Object], service: FlowPrefillService, now: Scene) -> dict[str, int]:
    """Deployments whose replicas the operator still owns and no longer sets, with the number to leave them at: the one
    they have, within the autoscaler's bounds, which hold even where no autoscaler runs."""
    found: dict[str, int] = {}
    for item in wanted:
        key = key_of(item)
        known = now.objects.get(key)
        spec = item.get("spec")
        if key[0] != DEPLOYMENTS or known is None or not isinstance(spec, Mapping) or "replicas" in spec:
            continue
        if owns_replicas(known) and isinstance(known.detail, Workload):
            found[key[1]] = _within(service, role_of(item), known.detail.replicas)
    return found


def owns_replicas(known: Observed) -> bool:
    """Whether the operator is an owner of a Deployment's number of pods."""
    fields = json.loads(known.fields) if known.fields else {}
    return "f:replicas" in fields.get("f:spec", {})


def same_generation(item: Object, now: Scene) -> Object:
    """The live document with the generation that pods have it under, unless it says something new."""
    data = item.get("data")
    known = now.objects.get(key_of(item))
    if known is None or not isinstance(data, Mapping) or labels.LIVE_KEY not in data:
        return item
    old, new = known.data.get(labels.LIVE_KEY, ""), str(data[labels.LIVE_KEY])
    return (
        {**item, "data": dict(known.data)} if _without_generation(old) == _without_generation(new) else item
    )


def _without_generation(text: str) -> object:
    try:
        body = json.loads(text)
        del body["generation"]
    except (ValueError, KeyError, TypeError):
        return None
    return body


def kept(revision: Revision | None, now: Scene, *, workers: bool) -> list[Object]:
    """What still belongs to a revision that serves on, with as many pods as it has."""
    if revision is None:
        return []
    kept: list[Object] = []
    for key, item in revision.objects.items():
        if role_of(item) == PROXY or key not in now.objects:
            continue
        if key[0] == DEPLOYMENTS:
            if not workers:
                continue
            known = now.objects[key]
            if isinstance(known.detail, Workload) and owns_replicas(known):
                spec = item["spec"]
                assert isinstance(spec, Mapping)
                item = {**item, "spec": {**spec, "replicas": known.detail.replicas}}
        kept.append(item)
    return kept
