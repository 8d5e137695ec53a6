"""Which revision a spec asks for, and what its record keeps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowprefill_crd import FlowPrefillService, parse_service, restart_hash
from flowprefill_operator.kinds import DEPLOYMENTS, RECORDS, kind_of
from flowprefill_operator.observe.observed import Observed, observe
from flowprefill_operator.plan import plan
from flowprefill_operator.resources.base import Context
from flowprefill_operator.revisions import (
    Revision,
    Target,
    as_recorded,
    choose,
    images_of,
    key_of,
    read_records,
    record,
)
from flowprefill_operator.settings import PlanSettings
from support.cluster_objects import owned_object
from support.services import MINIMAL_SPEC, Spec, document, merged
from support.simulated_cluster import UID, with_images

OLD, NEW = with_images(PlanSettings(), "1"), with_images(PlanSettings(), "2")
NEW_IMAGES = "registry.example/torch:2, registry.example/proxy:2"


def service(changes: Spec | None = None) -> FlowPrefillService:
    return parse_service(document(merged(MINIMAL_SPEC, changes or {}), namespace="ns", uid=UID))


HASH = restart_hash(service())


def revision(name: str, number: int, *, settings: PlanSettings = OLD, spec_hash: str = HASH) -> Revision:
    images = images_of(Context(service(), settings))
    return Revision(name=name, number=number, spec_hash=spec_hash, images=images, objects={})


def records(*found: Revision) -> dict[str, Revision]:
    return {each.name: each for each in found}


def chosen(target: Target) -> tuple[str, int, str | None]:
    return target.name, target.number, target.upgrade


def test_the_first_revision_is_named_by_its_spec() -> None:
    assert chosen(choose(service(), OLD, {})) == (HASH, 1, None)


def test_a_recorded_spec_is_its_revision_and_another_spec_is_the_next() -> None:
    known = records(revision(HASH, 1))
    target = choose(service(), OLD, known)
    assert (chosen(target), target.recorded) == ((HASH, 1, None), known[HASH])
    other = service({"engine": {"kvCacheTokens": 4096}})
    assert chosen(choose(other, OLD, known)) == (restart_hash(other), 2, None)


def test_a_revision_that_is_gone_back_to_becomes_the_latest() -> None:
    known = records(revision(HASH, 1), revision("other", 2, spec_hash="other"))
    assert chosen(choose(service(), OLD, known)) == (HASH, 3, None)


def test_another_default_image_is_named_and_not_taken_under_manual() -> None:
    known = records(revision(HASH, 1))
    assert chosen(choose(service(), NEW, known)) == (HASH, 1, NEW_IMAGES)


def test_another_default_image_is_a_revision_of_its_own_under_automatic_and_then_the_one_that_stays() -> None:
    automatic = service({"upgradePolicy": "Automatic"})
    target = choose(automatic, NEW, records(revision(HASH, 1)))
    name, number, upgrade = chosen(target)
    assert name != HASH
    assert (number, upgrade, target.recorded) == (2, None, None)
    assert choose(automatic, NEW, records(revision(HASH, 1))).name == name, "always the same name"
    both = records(revision(HASH, 1), revision(name, 2, settings=NEW))
    assert chosen(choose(automatic, NEW, both)) == (name, 2, None)
    # Manual again: what runs stays.
    assert chosen(choose(service(), NEW, both)) == (name, 2, None)


def test_an_operator_of_the_release_before_takes_the_revision_of_its_image_again_under_automatic() -> None:
    automatic = service({"upgradePolicy": "Automatic"})
    both = records(revision(HASH, 1), revision("upgraded", 2, settings=NEW))
    target = choose(automatic, OLD, both)
    assert (chosen(target), target.recorded) == ((HASH, 3, None), both[HASH])


def test_an_image_that_the_spec_names_is_no_default_that_could_be_upgraded() -> None:
    own = service({"engine": {"image": "mine:1"}})
    target = choose(own, OLD, {})
    planned = plan(own, OLD, revision=target.name)
    kept = read_records([stored(record(Context(own, OLD), target, planned))], UID)
    upgraded = choose(own, NEW, kept).upgrade
    assert upgraded == "registry.example/proxy:2"


def stored(item: dict[str, Any], *, uid: str = UID) -> Observed:
    """A record as it is read back."""
    body = json.loads(json.dumps(item))
    body["metadata"] |= {
        "uid": "r",
        "resourceVersion": "1",
        "ownerReferences": [{"uid": uid, "controller": True}],
    }
    return observe(RECORDS, body)


def test_a_record_is_read_back_as_it_was_written() -> None:
    context = Context(service(), OLD)
    target = choose(service(), OLD, {})
    planned = plan(service(), OLD)
    found = read_records([stored(record(context, target, planned))], UID)[HASH]
    assert (found.name, found.number, found.spec_hash) == (HASH, 1, HASH)
    assert found.images == images_of(context)
    assert {key[0].kind for key in found.objects} == {"ConfigMap", "NetworkPolicy", "Service", "Deployment"}
    templates = {
        key_of(item): item["spec"]["template"]  # type: ignore[index]
        for item in planned
        if kind_of(item) == DEPLOYMENTS
    }
    assert {k: i["spec"]["template"] for k, i in found.objects.items() if k in templates} == templates  # type: ignore[index]


def test_a_record_says_nothing_of_the_number_of_pods() -> None:
    """It changes without a new revision, and a record cannot be changed."""
    context, target = Context(service(), OLD), choose(service(), OLD, {})
    more = service({"prefill": {"replicas": 5}})
    one = record(context, target, plan(service(), OLD))
    assert record(Context(more, OLD), target, plan(more, OLD)) == one
    assert '"replicas"' not in json.dumps(one)


def test_a_recorded_revision_is_written_again_word_for_word() -> None:
    context = Context(service(), OLD)
    first = record(context, choose(service(), OLD, {}), plan(service(), OLD))
    kept = read_records([stored(first)], UID)
    again = record(Context(service(), NEW), choose(service(), NEW, kept), plan(service(), NEW))
    assert again == first


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"revision": "r"},
        {"revision": "r", "specHash": "h", "images": {}, "objects": [{"kind": "Unknown"}]},
        {"revision": "r", "specHash": "h", "images": {}, "objects": 3},
        {"revision": "r", "specHash": "h", "images": 3, "objects": []},
    ],
)
def test_a_record_that_makes_no_sense_is_none(data: Any) -> None:
    item = owned_object(RECORDS, "r", revision=1, data=data)
    assert read_records([stored(item)], UID) == {}


def test_a_record_of_another_service_is_none() -> None:
    context, target = Context(service(), OLD), choose(service(), OLD, {})
    item = record(context, target, plan(service(), OLD))
    assert read_records([stored(item, uid="another")], UID) == {}


def test_a_deployment_is_as_recorded_where_pods_depend_on_it_and_as_planned_elsewhere() -> None:
    target = choose(service(), OLD, {})
    kept = read_records([stored(record(Context(service(), OLD), target, plan(service(), OLD)))], UID)[HASH]
    changed = service({"prefill": {"replicas": 3}, "rollout": {"timeoutSeconds": 7200}})
    for item in plan(changed, NEW):
        found: Any = as_recorded(item, kept)
        if kind_of(item) != DEPLOYMENTS:
            continue
        before: Any = kept.objects[key_of(item)]
        assert found["spec"]["template"] == before["spec"]["template"]
        assert found["spec"]["progressDeadlineSeconds"] == 7200
        if "prefill" in found["metadata"]["name"]:
            assert found["spec"]["replicas"] == 3


def test_what_was_not_recorded_is_as_planned() -> None:
    item = plan(service(), OLD)[0]
    assert as_recorded(item, None) is item
    assert as_recorded(item, revision("other", 1)) is item
