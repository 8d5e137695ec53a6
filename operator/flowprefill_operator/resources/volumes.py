"""Volumes of the pods and where they are mounted."""

from __future__ import annotations

from pathlib import PurePosixPath

from flowprefill_crd.podconfig import API_KEYS_FILE, PROFILE_FILE
from flowprefill_crd.v1alpha1.roles import WorkerRole
from flowprefill_operator.labels import Role
from flowprefill_operator.resources import vllm
from flowprefill_operator.resources.base import Context, Object
from flowprefill_operator.resources.profile import profile_source

CONFIG_DIR = "/etc/flowprefill/config"
LIVE_DIR = "/etc/flowprefill/live"
ENDPOINTS_DIR = "/etc/flowprefill/endpoints"
CACHE_DIR = "/var/cache/flowprefill"
CLAIM_DIR = "/var/lib/flowprefill/claims"
"""Claims that a `pvc://CLAIM/PATH` model names are mounted read-only at `CLAIM_DIR/CLAIM`."""
MODEL_PIN = "/tmp/model-commit.json"
"""Where the containers of one pod keep the commit of its model, in a volume of the pod alone."""
CHECKS_KEYS = frozenset({"proxy", "colocated"})
"""The roles that check clients' API keys."""
SHARED_MEMORY_PER_RANK_MIB = 512
SCRATCH_SIZE = "1Gi"

_CACHE = "model-cache"


def needs_download(context: Context) -> bool:
    """Whether the model has to be fetched before a server can load it."""
    return context.service.spec.model.scheme == "hf"


def cache_environment() -> list[object]:
    """Where the libraries that fetch and load models keep their files, and the pod the commit of its model."""
    return [
        {"name": "XDG_CACHE_HOME", "value": CACHE_DIR},
        {"name": "FLOWPREFILL_MODEL_PIN", "value": MODEL_PIN},
    ]


def cache_mounts() -> list[object]:
    """Mounts of the container that fetches the model."""
    return [_mount(_CACHE, CACHE_DIR), _mount("tmp", "/tmp")]


def volumes(context: Context, role: Role) -> list[object]:
    """The volumes of a role's pod."""
    found: list[object] = [
        {"name": "config", "configMap": {"name": context.config_name}},
        {"name": "live", "configMap": {"name": context.live_name}},
        {"name": "tmp", "emptyDir": {"sizeLimit": SCRATCH_SIZE}},
    ]
    spec = context.service.spec
    keys = spec.security.api_keys_secret_ref
    if keys is not None and role in CHECKS_KEYS:
        item = {"key": keys.key, "path": PurePosixPath(API_KEYS_FILE).name}
        found.append({"name": "api-keys", "secret": {"secretName": keys.name, "items": [item]}})
    if role == "proxy":
        if context.settings.local is not None:
            found.append({"name": "endpoints", "hostPath": {"path": str(context.settings.local.endpoints)}})
        return found
    found.append(
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _shared_memory(context, role)}}
    )
    if (cache := vllm.cache_volume(context, role)) is not None:
        found.append(cache)
    profile = profile_source(context)
    if profile is not None and role != "decode":
        found.append({"name": "profile", "configMap": {"name": profile}})
    if spec.model.scheme == "pvc":
        claim = spec.model.location.partition("/")[0]
        found.append({"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    if needs_download(context):
        found.append({"name": _CACHE, **_cache_source(context)})
    return found


def mounts(context: Context, role: Role) -> list[object]:
    """The mounts of a role's own container, one for each of `volumes`."""
    spec = context.service.spec
    found: list[object] = [
        _mount("config", CONFIG_DIR, read_only=True),
        _mount("live", LIVE_DIR, read_only=True),
        _mount("tmp", "/tmp"),
    ]
    if spec.security.api_keys_secret_ref is not None and role in CHECKS_KEYS:
        found.append(_mount("api-keys", str(PurePosixPath(API_KEYS_FILE).parent), read_only=True))
    if role == "proxy":
        if context.settings.local is not None:
            found.append(_mount("endpoints", ENDPOINTS_DIR, read_only=True))
        return found
    found.append(_mount("shm", "/dev/shm"))
    if vllm.cache_volume(context, role) is not None:
        found.append(_mount(vllm.CACHE_VOLUME, vllm.CACHE_DIR))
    if profile_source(context) is not None and role != "decode":
        found.append(_mount("profile", str(PurePosixPath(PROFILE_FILE).parent), read_only=True))
    if spec.model.scheme == "pvc":
        claim = spec.model.location.partition("/")[0]
        found.append(_mount("model", f"{CLAIM_DIR}/{claim}", read_only=True))
    if needs_download(context):
        found.append(_mount(_CACHE, CACHE_DIR))
    return found


def _cache_source(context: Context) -> Object:
    if context.settings.local is not None:
        return {"hostPath": {"path": str(context.settings.local.cache)}}
    cache = context.service.spec.model.resolved_cache
    assert cache is not None, "only an hf:// model is downloaded"
    if cache.claim is not None:
        return {"persistentVolumeClaim": {"claimName": cache.claim.name}}
    if cache.persistent_volume_claim is not None:
        return {"persistentVolumeClaim": {"claimName": context.cache_name}}
    assert cache.empty_dir is not None
    return {"emptyDir": {"sizeLimit": cache.empty_dir.size_limit}}


def _shared_memory(context: Context, role: Role) -> str:
    """Size of /dev/shm: what the ranks of one pod exchange; it counts as the pod's memory."""
    spec = context.spec_of(role)
    ranks = spec.tensor_parallel_size if isinstance(spec, WorkerRole) else 1
    mib = vllm.shared_memory_mib(ranks) if vllm.runs(context, role) else SHARED_MEMORY_PER_RANK_MIB * ranks
    return f"{mib}Mi"


def _mount(name: str, path: str, *, read_only: bool = False) -> Object:
    mount: Object = {"name": name, "mountPath": path}
    if read_only:
        mount["readOnly"] = True
    return mount
