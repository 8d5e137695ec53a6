"""The commit of a revision's hf:// model: kept once, followed by every pod that comes later."""

from __future__ import annotations

from flowprefill_operator import labels
from flowprefill_operator.resources.base import Context, Object

MODEL_CONTAINER = "model"
"""Name of the init container that fetches the model."""


def model_commit(context: Context, commit: str) -> Object:
    """`<name>-<rev>-model`: the commit that the model's branch or tag stood for when the revision's first pod asked.

    Immutable: two pods of a revision must not have different weights. It is not a planned object: nobody but a pod
    knows its content.
    """
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": context.metadata(_name(context), revision=True),
        "immutable": True,
        "data": {labels.COMMIT_KEY: commit},
    }


def commit_environment(context: Context) -> list[object]:
    """What tells the init container the commit. Absent for the first pods: no pod waits for the ConfigMap, and none
    restarts because of it."""
    ref = {"name": _name(context), "key": labels.COMMIT_KEY, "optional": True}
    return [{"name": "FLOWPREFILL_MODEL_COMMIT", "valueFrom": {"configMapKeyRef": ref}}]


def _name(context: Context) -> str:
    return context.name(context.revision, "model")
