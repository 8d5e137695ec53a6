"""Revisions of a service and the records that keep them as they were rendered. Pure.

A revision is named by the hash of the restart-relevant spec. What its pods are made of is rendered once and kept in a
ControllerRevision, so that an operator of another release, which would render other pods, restarts none. A newer default
image is taken with the next restart-relevant change, or at once under `upgradePolicy: Automatic` and where nothing has
started of the one before, as a revision of its own name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowprefill_crd import FlowPrefillService, restart_hash
from flowprefill_operator import labels
from flowprefill_operator.kinds import DEPLOYMENTS, RECORDS, is_known, kind_of
from flowprefill_operator.observe.observed import Key, Observed, Record
from flowprefill_operator.resources.base import Context, Object
from flowprefill_operator.resources.pod import image
from flowprefill_operator.settings import PlanSettings

KEPT = 3
"""Records of revisions that no longer run and are kept, so that going back renders the same pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """What a record holds. `number` grows with use: the highest is the latest. `objects` are those that belong to the
    revision alone and the proxy's Deployment, all without `replicas`; `images` maps roles to images."""

    name: str
    number: int
    spec_hash: str
    images: Mapping[str, str]
    objects: Mapping[Key, Object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The revision that is to serve. `recorded` is None until its first pass; `upgrade` is the image that the operator
    would use now, when the revision has another one."""

    name: str
    number: int
    recorded: Revision | None
    upgrade: str | None


def read_records(observed: Iterable[Observed], uid: str) -> dict[str, Revision]:
    """The service's readable records, by name of the revision."""
    found: dict[str, Revision] = {}
    for item in observed:
        if item.kind == RECORDS and item.controller == uid and isinstance(item.detail, Record):
            revision = _read(item.detail)
            if revision is not None:
                found[revision.name] = revision
    return found


def choose(
    service: FlowPrefillService,
    settings: PlanSettings,
    records: Mapping[str, Revision],
    *,
    started: Callable[[str], bool] = lambda revision: True,
) -> Target:
    """The revision that the spec asks for, of those that exist or a new one. `started` says whether anything of a revision
    runs or has: an image that cannot be pulled is not held on to."""
    spec_hash = restart_hash(service)
    images = images_of(Context(service, settings))
    latest = max((r.number for r in records.values()), default=0)
    mine = [r for r in records.values() if r.spec_hash == spec_hash]
    if not mine:
        return Target(name=spec_hash, number=latest + 1, recorded=None, upgrade=None)
    newest = max(mine, key=lambda r: r.number)
    outdated = newest.images != images
    if outdated and (service.spec.upgrade_policy == "Automatic" or not started(newest.name)):
        same = next((r for r in mine if r.images == images), None)  # used before, and to be used again
        name = _upgraded(spec_hash, images) if same is None else same.name
        return Target(name=name, number=latest + 1, recorded=same, upgrade=None)
    return Target(
        name=newest.name,
        number=newest.number if newest.number == latest else latest + 1,
        recorded=newest,
        upgrade=_difference(newest.images, images) if outdated else None,
    )


def images_of(context: Context) -> dict[str, str]:
    """The image of each role as the operator would plan it now."""
    return {role: image(context, role) for role in context.roles}


def belongs_to_revision(item: Object) -> bool:
    """Whether a planned object is kept as it was rendered: what carries the revision's name in its labels."""
    meta = item["metadata"]
    assert isinstance(meta, Mapping)
    return labels.REVISION in meta["labels"]


def record(context: Context, target: Target, planned: Sequence[Object]) -> Object:
    """The ControllerRevision of the target: as it was recorded, or of what is planned now."""
    if target.recorded is not None:
        kept: Mapping[Key, Object] = target.recorded.objects
        images, spec_hash = target.recorded.images, target.recorded.spec_hash
    else:
        own = [item for item in planned if belongs_to_revision(item)]
        kept = {key_of(item): without_replicas(item) for item in own}
        images, spec_hash = images_of(context), restart_hash(context.service)
    return {
        "apiVersion": RECORDS.api_version,
        "kind": RECORDS.kind,
        "metadata": context.metadata(context.config_name, revision=True),
        "revision": target.number,
        "data": {
            "revision": target.name,
            "specHash": spec_hash,
            "images": dict(images),
            "objects": list(kept.values()),
        },
    }


def recorded_deployments(steps: Iterable[Iterable[Object]]) -> list[Object]:
    """The Deployments that a goal's record holds: of every role, also of proxies that are replaced later."""
    found: list[Object] = []
    for item in (item for step in steps for item in step if kind_of(item) == RECORDS):
        data = item["data"]
        assert isinstance(data, Mapping)
        found += [held for held in data["objects"] if kind_of(held) == DEPLOYMENTS]
    return found


def as_recorded(item: Object, recorded: Revision | None) -> Object:
    """A planned object with what a restart depends on as it was rendered at first."""
    before = None if recorded is None else recorded.objects.get(key_of(item))
    if before is None:
        return item
    if kind_of(item) != DEPLOYMENTS:
        return before
    spec, old, meta, old_meta = item["spec"], before["spec"], item["metadata"], before["metadata"]
    assert isinstance(spec, Mapping)
    assert isinstance(old, Mapping)
    assert isinstance(meta, Mapping)
    assert isinstance(old_meta, Mapping)
    return {
        **item,
        "metadata": {**meta, "labels": old_meta["labels"]},
        "spec": {**spec, "template": old["template"], "selector": old["selector"]},
    }


def key_of(item: Object) -> Key:
    """Kind and name of a planned object."""
    meta = item["metadata"]
    assert isinstance(meta, Mapping)
    return (kind_of(item), str(meta["name"]))


def without_replicas(item: Object) -> Object:
    """A Deployment without its number of pods; anything else as it is."""
    if kind_of(item) != DEPLOYMENTS:
        return item
    spec = item["spec"]
    assert isinstance(spec, Mapping)
    return {**item, "spec": {key: value for key, value in spec.items() if key != "replicas"}}


def _read(found: Record) -> Revision | None:
    try:
        data: Any = json.loads(found.data)  # Any: what another release wrote
        # A newer release may have recorded kinds that this one does not know; it has made them, and prunes them.
        known = [item for item in data["objects"] if is_known(item)]
        objects = {key_of(item): item for item in known}
        return Revision(
            name=str(data["revision"]),
            number=found.number,
            spec_hash=str(data["specHash"]),
            images=dict(data["images"]),
            objects=objects,
        )
    except (ValueError, KeyError, TypeError, AssertionError):
        return None


def _upgraded(spec_hash: str, images: Mapping[str, str]) -> str:
    text = json.dumps([spec_hash, images], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _difference(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """The images that an upgrade would change to, without repeats."""
    return ", ".join(dict.fromkeys(image for role, image in new.items() if old.get(role) != image))
