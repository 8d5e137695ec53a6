"""The Job that measures prefill times once for all prefill pods, and the ConfigMap that keeps its result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import cast

from flowprefill_crd.podconfig import PROFILE_FILE
from flowprefill_operator import labels
from flowprefill_operator.resources import volumes
from flowprefill_operator.resources.base import Context, Object
from flowprefill_operator.resources.pod import TERMINATION_LOG, container_name, pod_spec, pod_template
from flowprefill_operator.resources.profile import profile_name, profiler_config_name

PROFILE_KEY = PurePosixPath(PROFILE_FILE).name
"""Key of the profile in a ConfigMap."""
BACKOFF_LIMIT = 2
"""Tries after the first; what fails three times fails for a reason."""
DEADLINE_FACTOR = 2
"""A try may take twice the startup time of a prefill pod: fetching image and model count here and not there."""

_SERVES_ONLY = frozenset({"live", "api-keys", "profile"})
"""Volumes of prefill pods that the profiler has no use for."""
_KEPT = frozenset(
    {
        "image",
        "imagePullPolicy",
        "env",
        "envFrom",
        "resources",
        "securityContext",
        "volumeMounts",
        "volumeDevices",
        "workingDir",
    }
)
"""What the profiler's container has in common with that of a prefill pod: no probes, no ports, no hooks."""
_OF_SERVING = frozenset(
    {"containers", "volumes", "topologySpreadConstraints", "terminationGracePeriodSeconds", "restartPolicy"}
)


def profiling_job(context: Context) -> Object | None:
    """`<name>-profile-<key>`: one pod like a prefill pod, for as long as the measuring takes.

    None unless the service asks for it. Its pod template cannot be changed once it is there, and needs not: what the
    measurement depends on is in its name.
    """
    if not context.service.spec.scheduling.predictor.profiling_job:
        return None
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": context.metadata(profile_name(context), labels.PROFILER),
        "spec": {
            "backoffLimit": BACKOFF_LIMIT,
            # A try that ends because its node is drained does not count.
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
                ]
            },
            "template": _template(context),
        },
    }


def profile_config_map(context: Context, text: str) -> Object:
    """`<name>-profile-<key>`: the result, `text` as the Job left it in its termination message."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": context.metadata(profile_name(context), labels.PROFILER),
        "data": {PROFILE_KEY: text},
    }


def profiles_of(objects: Iterable[Object]) -> frozenset[str]:
    """Names of the ConfigMaps that pods of these Deployments start from: what has to stay while they may start."""
    return frozenset(
        str(_mapping(volume["configMap"])["name"])
        for item in objects
        if item["kind"] == "Deployment"
        for volume in _items(
            _mapping(_mapping(_mapping(item["spec"])["template"])["spec"]).get("volumes", [])
        )
        if volume.get("name") == "profile" and "configMap" in volume
    )


def _template(context: Context) -> Object:
    """The prefill pods' template with the user's changes, cut down to the one container that measures."""
    role = context.worker_roles[0]
    prefill = pod_template(context, role)
    spec = _mapping(prefill["spec"])
    planned = _items(pod_spec(context, role)["containers"])[0]
    own = next((c for c in _items(spec["containers"]) if c.get("name") == container_name(role)), planned)
    kept: Object = {key: value for key, value in spec.items() if key not in _OF_SERVING}
    kept |= {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": DEADLINE_FACTOR * context.service.spec.prefill.startup_timeout_seconds,
        "containers": [_container(own)],
        "volumes": [
            _config_volume(context, volume)
            for volume in _items(spec.get("volumes", []))
            if volume["name"] not in _SERVES_ONLY
        ],
    }
    changes = context.spec_of(role).pod_template.metadata
    metadata: Object = {"labels": changes.labels | context.labels(labels.PROFILER)}
    if changes.annotations:
        metadata["annotations"] = changes.annotations
    return {"metadata": metadata, "spec": kept}


def _container(own: Mapping[str, object]) -> Object:
    kept = {key: value for key, value in own.items() if key in _KEPT}
    kept["volumeMounts"] = [m for m in _items(own.get("volumeMounts", [])) if m["name"] not in _SERVES_ONLY]
    config = f"{volumes.CONFIG_DIR}/{labels.CONFIG_KEY}"
    return {
        "name": labels.PROFILER,
        "command": ["flowprefill", "profile"],
        "args": ["--config", config, "--output", TERMINATION_LOG],
        **kept,
    }


def _config_volume(context: Context, volume: Mapping[str, object]) -> Mapping[str, object]:
    if volume["name"] != "config":
        return volume
    return {"name": "config", "configMap": {"name": profiler_config_name(context)}}


def _mapping(value: object) -> Mapping[str, object]:
    return cast(Mapping[str, object], value)  # planned templates are JSON, whose parts the type does not name


def _items(value: object) -> list[Mapping[str, object]]:
    return cast(list[Mapping[str, object]], value)
