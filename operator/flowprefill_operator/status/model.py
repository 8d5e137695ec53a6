"""The model that is served, and the commit that its revision stood for."""

from __future__ import annotations

import json

from flowprefill_crd.v1alpha1 import ResolvedModel
from flowprefill_operator import labels
from flowprefill_operator.kinds import CONFIG_MAPS
from flowprefill_operator.pinning import commits
from flowprefill_operator.status.view import View


def resolved_model(view: View, revision: str | None) -> ResolvedModel:
    """The model of a revision's pods: by the document that they read, and the commit that they told.

    Of the spec while there is no such document.
    """
    asked = view.service.spec.model
    uri, served_name = _in_document(view, revision) or (asked.uri, asked.resolved_served_name)
    commit = None if revision is None else commits(view.scene).get(revision)
    return ResolvedModel(uri=uri, revision=commit, served_name=served_name)


def _in_document(view: View, revision: str | None) -> tuple[str, str] | None:
    """URI and served name."""
    for item in view.scene.objects.values():
        mine = item.kind == CONFIG_MAPS and item.labels.get(labels.REVISION) == revision
        if mine and labels.CONFIG_KEY in item.data:
            try:
                model = json.loads(item.data[labels.CONFIG_KEY])["model"]
                return str(model["uri"]), str(model["servedName"])
            except (ValueError, KeyError, TypeError):  # of another release
                return None
    return None
