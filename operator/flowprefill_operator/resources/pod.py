"""The pod of a role: one container that runs `flowprefill serve` or `flowprefill proxy`."""

from __future__ import annotations

import math

from flowprefill_crd.v1alpha1.roles import Proxy, WorkerRole
from flowprefill_crd.v1alpha1.roles import Role as RoleSpec
from flowprefill_operator import labels
from flowprefill_operator.labels import Role
from flowprefill_operator.resources import vllm, volumes
from flowprefill_operator.resources.base import (
    WORKER_ADMIN_PORT,
    WORKER_API_PORT,
    WORKER_KV_PORT,
    Context,
    Object,
)
from flowprefill_operator.resources.image import image as image
from flowprefill_operator.resources.merge import merge
from flowprefill_operator.resources.model_commit import MODEL_CONTAINER, commit_environment

GRACE_MARGIN_S = 10
"""Added to the steps of stopping, so that the kill never meets a pod that is just about done."""
TERMINATION_LOG = "/dev/termination-log"
"""Kubernetes's default place of a container's last words, at most 4096 bytes."""
STARTUP_PERIOD_S = 1
READINESS_PERIOD_S = 2
LIVENESS_PERIOD_S = 10
LIVENESS_FAILURES = 6
"""A minute without an answer: a busy CPU delays answers, and a restart throws work away."""


def pod_template(context: Context, role: Role) -> Object:
    """Metadata and spec of a role's pods, with the role's podTemplate merged in."""
    changes = context.spec_of(role).pod_template
    planned = pod_spec(context, role)
    metadata: Object = {"labels": changes.metadata.labels | context.labels(role, revision=True)}
    annotations = {
        "kubectl.kubernetes.io/default-container": container_name(role)
    } | changes.metadata.annotations
    metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": merge(planned, changes.spec)}


def container_name(role: Role) -> str:
    """Name of a role's own container, which podTemplate changes it by."""
    return "prefill" if role == "colocated" else role


def grace_period_s(context: Context, role: Role) -> int:
    """Longest stop of a pod in seconds: above preStop + lame duck + drain.

    A prefill pod then also waits until the KV of its last prompts is pulled or its lease is over.
    """
    steps = context.service.spec.termination
    lease_s = context.service.spec.kv_transfer.lease_seconds if role == "prefill" else 0
    return steps.pre_stop_seconds + steps.lame_duck_seconds + steps.drain_seconds + lease_s + GRACE_MARGIN_S


def pod_spec(context: Context, role: Role) -> Object:
    """The spec as planned, before the user's changes."""
    user = context.settings.user_id
    spec: Object = {
        "automountServiceAccountToken": role == "proxy",
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_period_s(context, role),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": context.selector(role)},
            }
        ],
        "containers": [_container(context, role)],
        "volumes": volumes.volumes(context, role),
    }
    if role == "proxy":
        spec["serviceAccountName"] = context.name("proxy")
    elif volumes.needs_download(context):
        spec["initContainers"] = [_model_pull(context)]
    secrets = pull_secrets(context)
    if secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in secrets]
    return spec


def pull_secrets(context: Context) -> tuple[str, ...]:
    """Names of the Secrets that images are pulled with: the service's own, then the operator's, each once."""
    own = (secret.name for secret in context.service.spec.image_pull_secrets)
    return tuple(dict.fromkeys((*own, *context.settings.image_pull_secrets)))


def _container(context: Context, role: Role) -> Object:
    role_spec = context.spec_of(role)
    startup_period_s = vllm.STARTUP_PERIOD_S if vllm.runs(context, role) else STARTUP_PERIOD_S
    container: Object = {
        "name": container_name(role),
        "image": image(context, role),
        "imagePullPolicy": context.settings.image_pull_policy,
        "command": ["flowprefill", "proxy"] if role == "proxy" else ["flowprefill", "serve"],
        "args": _args(context, role),
        "env": _environment(context, role),
        "ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"}
            for name, port in ports(context, role).items()
        ],
        "startupProbe": _probe(
            "/ready",
            period_s=startup_period_s,
            timeout_s=5,
            failures=math.ceil(_startup_timeout_s(role_spec) / startup_period_s),
        ),
        "readinessProbe": _probe("/ready", period_s=READINESS_PERIOD_S, timeout_s=5, failures=3),
        "livenessProbe": _probe(
            "/health", period_s=LIVENESS_PERIOD_S, timeout_s=5, failures=LIVENESS_FAILURES
        ),
        "resources": _resources(context, role),
        "securityContext": _restricted(),
        "volumeMounts": volumes.mounts(context, role),
    }
    pre_stop_s = context.service.spec.termination.pre_stop_seconds
    if pre_stop_s:
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": pre_stop_s}}}
    return container


def ports(context: Context, role: Role) -> dict[str, int]:
    """Container ports by name."""
    if role == "proxy":
        proxy = context.service.spec.proxy
        return {labels.API_PORT: proxy.port_api, labels.ADMIN_PORT: proxy.port_admin}
    found = {labels.API_PORT: WORKER_API_PORT, labels.ADMIN_PORT: WORKER_ADMIN_PORT}
    if role != "colocated":
        found[labels.KV_PORT] = WORKER_KV_PORT
    return found


def _args(context: Context, role: Role) -> list[str]:
    number = ports(context, role)
    args = [] if role == "proxy" else ["--role", role]
    args += ["--config", f"{volumes.CONFIG_DIR}/{labels.CONFIG_KEY}", "--live", volumes.LIVE_DIR]
    if role == "proxy":
        file = f"{volumes.ENDPOINTS_DIR}/{labels.ENDPOINTS_KEY}"
        args += ["--discover", "kubernetes"] if context.settings.local is None else ["--endpoints", file]
    args += ["--host", "0.0.0.0"]
    args += ["--port", str(number[labels.API_PORT]), "--admin-port", str(number[labels.ADMIN_PORT])]
    if labels.KV_PORT in number:
        args += ["--kv-port", str(number[labels.KV_PORT])]
    return args


def _environment(context: Context, role: Role) -> list[object]:
    """What Kubernetes knows of the pod, and what numeric libraries read before any code of ours runs."""
    found: list[object] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in (
            ("POD_NAME", "metadata.name"),
            ("POD_NAMESPACE", "metadata.namespace"),
            ("POD_IP", "status.podIP"),
            ("NODE_NAME", "spec.nodeName"),
        )
    ]
    engine = context.service.spec.engine
    if role != "proxy" and engine.type != "simulated":
        # Waiting OpenMP threads would otherwise spin and take the CPU from the thread that works.
        found += [
            {"name": "OMP_NUM_THREADS", "value": str(engine.threads)},
            {"name": "OMP_WAIT_POLICY", "value": "PASSIVE"},
            {"name": "KMP_BLOCKTIME", "value": "0"},
        ]
    fetched = role != "proxy" and volumes.needs_download(context)
    if fetched:
        found += volumes.cache_environment()
    if fetched or vllm.runs(context, role):
        # The init container has fetched the model; a server never goes to the network for it.
        found.append({"name": "HF_HUB_OFFLINE", "value": "1"})
    return found + vllm.environment(context, role)


def _model_pull(context: Context) -> Object:
    model = context.service.spec.model
    env = [*volumes.cache_environment(), *commit_environment(context)]
    if model.secret_ref is not None:
        ref = {"name": model.secret_ref.name, "key": model.secret_ref.key}
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": ref}})
    args = ["pull", model.uri]
    if model.resolved_revision is not None:
        args += ["--revision", model.resolved_revision]
    if context.settings.local is None:
        args += ["--termination-log", TERMINATION_LOG]
    return {
        "name": MODEL_CONTAINER,
        "image": image(context, context.worker_roles[0]),
        "imagePullPolicy": context.settings.image_pull_policy,
        "command": ["flowprefill", "model"],
        "args": args,
        "env": env,
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
        "securityContext": _restricted(),
        "volumeMounts": volumes.cache_mounts(),
    }


def _probe(path: str, *, period_s: int, timeout_s: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": labels.ADMIN_PORT},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }


def _startup_timeout_s(role: RoleSpec) -> int:
    assert isinstance(role, WorkerRole | Proxy)
    return role.startup_timeout_seconds


def _resources(context: Context, role: Role) -> Object:
    asked = context.spec_of(role).resources
    limits = {**asked.limits, **vllm.gpus(context, role, container_name(role))}
    asked = asked.model_copy(update={"limits": limits})
    return asked.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude_none=True)


def _restricted() -> Object:
    """What the restricted pod security standard asks of a container."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
