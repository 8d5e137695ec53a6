"""The claim for downloaded model files."""

from __future__ import annotations

from flowprefill_operator.resources.base import Context, Object


def model_cache_claim(context: Context) -> Object | None:
    """`<name>-model-cache`; None unless the service asks the operator for a claim.

    A claim to be retained has no owner reference, so it outlives the service.
    """
    cache = context.service.spec.model.resolved_cache
    claim = None if cache is None else cache.persistent_volume_claim
    if claim is None:
        return None
    spec: Object = {
        "accessModes": list(claim.access_modes),
        "resources": {"requests": {"storage": claim.storage}},
    }
    if claim.storage_class_name is not None:
        spec["storageClassName"] = claim.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": context.metadata(context.cache_name, owned=not claim.retain),
        "spec": spec,
    }
