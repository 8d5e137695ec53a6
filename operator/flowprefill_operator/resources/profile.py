"""The profile of prefill times that a Job measures: what it depends on, what the Job reads."""

from __future__ import annotations

import hashlib
import json

from flowprefill_crd import PodConfig, pod_config
from flowprefill_crd.podconfig import (
    PodDecode,
    PodKvTransfer,
    PodPredictor,
    PodProxy,
    PodTermination,
)
from flowprefill_operator import labels
from flowprefill_operator.resources.base import Context, Object
from flowprefill_operator.resources.image import image

KEY_DIGITS = 10


def profile_key(context: Context) -> str:
    """Ten hex digits that change exactly when prefill times have to be measured again.

    They stand for the model, the engine, its image, and what prefill pods ask of their node. Whatever else the
    service changes, the profile stays, over revisions too.
    """
    prefill = context.service.spec.prefill
    depends_on = {
        "config": json.loads(_config(context).to_json()),
        "image": image(context, context.worker_roles[0]),
        "nodes": prefill.nodes,
        "pod": prefill.pod_template.spec,
        "resources": prefill.resources.model_dump(mode="json", by_alias=True, exclude_defaults=True),
    }
    text = json.dumps(depends_on, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]


def profile_name(context: Context) -> str:
    """Name of the Job and of the ConfigMap with its result."""
    return context.name("profile", profile_key(context))


def profiler_config_name(context: Context) -> str:
    return context.name("profiler", profile_key(context))


def profile_source(context: Context) -> str | None:
    """Name of the ConfigMap that prefill pods take their profile from; None when they measure it themselves."""
    predictor = context.service.spec.scheduling.predictor
    return profile_name(context) if predictor.profiling_job else predictor.profile_config_map


def profiler_config(context: Context) -> Object | None:
    """`<name>-profiler-<key>`: what the Job reads; None unless the service asks for the Job.

    It is no revision's own, so that it stays while a Job runs that several revisions share.
    """
    if not context.service.spec.scheduling.predictor.profiling_job:
        return None
    config = _config(context).model_copy(update={"revision": profile_key(context)})
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": context.metadata(profiler_config_name(context), labels.PROFILER),
        "immutable": True,
        "data": {labels.CONFIG_KEY: config.to_json()},
    }


def _config(context: Context) -> PodConfig:
    """The prefill pods' document without what changes no prefill time."""
    config = pod_config(context.service, "")
    return config.model_copy(
        update={
            "decode": PodDecode(),
            "proxy": PodProxy(),
            "kv_transfer": PodKvTransfer(),
            "termination": PodTermination(),
            "api_keys_file": None,
            "predictor": PodPredictor(),
            "log_format": "json",
        }
    )
