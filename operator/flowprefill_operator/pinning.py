"""One commit for all pods of a revision whose model comes from a hub. Pure.

1. The first pods ask the hub what the branch stands for; each tells the commit in its init container's last words.
2. The one that the oldest of them told is kept in a ConfigMap, and nothing changes it any more.
3. Every later pod, of whichever role, is told that commit and asks no more.
First pods that asked at different moments may have different commits. Those that strayed are told in a condition, and
their revision takes no other's place while they are there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from flowprefill_crd import FlowPrefillService
from flowprefill_operator import labels
from flowprefill_operator.kinds import CONFIG_MAPS
from flowprefill_operator.observe.observed import Observed, Pod
from flowprefill_operator.resources.base import Context, Object
from flowprefill_operator.resources.model_commit import MODEL_CONTAINER, model_commit
from flowprefill_operator.scene import WORKER_ROLES, Scene
from flowprefill_operator.settings import PlanSettings

_COMMIT = re.compile(r"[0-9a-f]{40}")


def commit_maps(
    service: FlowPrefillService, settings: PlanSettings, now: Scene, revisions: Iterable[str | None]
) -> list[Object]:
    """The ConfigMaps of those of `revisions` whose commit is known."""
    known = commits(now)
    return [
        model_commit(Context(service, settings, revision), known[revision])
        for revision in revisions
        if revision is not None and revision in known
    ]


def commits(now: Scene) -> Mapping[str, str]:
    """Commits by revision: what is kept in the cluster, else what the revision's oldest pod that knows one has told."""
    found = {
        item.labels[labels.REVISION]: item.data[labels.COMMIT_KEY]
        for item in now.objects.values()
        if is_commit(item)
    }
    for _, pod in sorted(now.pods, key=lambda each: (each[1].since, each[0].name)):
        commit = told(pod)
        if commit is not None and pod.role in WORKER_ROLES:
            found.setdefault(pod.revision, commit)
    return found


def strays(now: Scene, revision: str) -> Mapping[str, str]:
    """Pods of a revision that are to stay and have another commit than it, by name."""
    settled = commits(now).get(revision)
    return {
        item.name: commit
        for item, pod in now.pods
        if pod.revision == revision and pod.role in WORKER_ROLES
        if not pod.terminating and pod.phase != "Failed"
        if (commit := told(pod)) is not None and commit != settled
    }


def is_commit(item: Observed) -> bool:
    """Whether an object keeps the commit of a revision."""
    return (
        item.kind == CONFIG_MAPS
        and labels.REVISION in item.labels
        and _COMMIT.fullmatch(item.data.get(labels.COMMIT_KEY, "")) is not None
    )


def told(pod: Pod) -> str | None:
    """The commit that a pod has fetched; None before it has, and for a pod that fetches nothing."""
    for container in pod.containers:
        if container.init and container.name == MODEL_CONTAINER and container.ended is not None:
            return _commit_in(container.ended[1]) if container.exit_code == 0 else None
    return None


def _commit_in(message: str) -> str | None:
    try:
        commit = str(json.loads(message)["commit"])
    except (ValueError, KeyError, TypeError):  # of another release, or of a container of the user's
        return None
    return commit if _COMMIT.fullmatch(commit) else None
