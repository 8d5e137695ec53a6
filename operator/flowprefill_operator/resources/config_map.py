"""The two documents that pods read: one for a revision, one that follows the service."""

from __future__ import annotations

from pathlib import Path

from flowprefill_crd import PodConfig, live_config, pod_config
from flowprefill_crd.podconfig import API_KEYS_FILE, PROFILE_FILE
from flowprefill_operator import labels
from flowprefill_operator.resources.base import Context, Object


def revision_config(context: Context) -> Object:
    """`<name>-<rev>`: what pods of the revision read at their start. Immutable."""
    config = _here(context, _config(context))
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": context.metadata(context.config_name, revision=True),
        "immutable": True,
        "data": {labels.CONFIG_KEY: config.to_json()},
    }


def _config(context: Context) -> PodConfig:
    return pod_config(
        context.service,
        context.revision,
        api_keys_file=_api_keys_file(context),
        profile_file=_profile_file(context),
    )


def _here(context: Context, config: PodConfig) -> PodConfig:
    """A claim's model, where the pods are processes of this machine, is a model in the folder of the claim."""
    local, model = context.settings.local, context.service.spec.model
    if local is None or model.scheme != "pvc":
        return config
    uri = f"file://{local.claims / model.location}"
    return config.model_copy(update={"model": config.model.model_copy(update={"uri": uri})})


def live_document(context: Context) -> Object:
    """`<name>-live`: what running pods follow."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": context.metadata(context.live_name),
        "data": {labels.LIVE_KEY: live_config(context.service).to_json()},
    }


def _api_keys_file(context: Context) -> str:
    ref = context.service.spec.security.api_keys_secret_ref
    local = context.settings.local
    if local is None or ref is None:
        return API_KEYS_FILE
    return str((local.files or Path()) / ref.name / ref.key)


def _profile_file(context: Context) -> str:
    name = context.service.spec.scheduling.predictor.profile_config_map
    local = context.settings.local
    if local is None or name is None:
        return PROFILE_FILE
    return str((local.files or Path()) / name / Path(PROFILE_FILE).name)
