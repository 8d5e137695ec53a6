"""`covers` on what a real API server noted.

recorded_fields.json holds objects that the operator applied and the `metadata.managedFields` that kube-apiserver 1.37
answered, as `test_ownership.py` of the cluster suite applies them; that suite looks at live servers of each release.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowprefill_operator.observe.managed_fields import applied_fields, covers

RECORDED: list[dict[str, Any]] = json.loads(Path(__file__).with_name("recorded_fields.json").read_text())
MANAGER = "flowprefill-operator"


def name(case: dict[str, Any]) -> str:
    return f"{case['applied']['kind']}"


def live(case: dict[str, Any]) -> dict[str, Any]:
    """The object as the server would answer it, as far as it matters here."""
    applied = case["applied"]
    return {
        "apiVersion": applied["apiVersion"],
        "metadata": {"managedFields": case["managedFields"]},
    }


def owned(case: dict[str, Any]) -> dict[str, Any]:
    found = applied_fields(live(case), MANAGER)
    assert found is not None
    return found


def nodes(fields: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, child in fields.items():
        if key != ".":
            yield (*path, key)
            yield from nodes(child, (*path, key))


def is_key(path: tuple[str, ...]) -> bool:
    """Whether it is a field that its list item is named by: with another value it is another item."""
    return len(path) > 1 and path[-2].startswith("k:") and path[-1][2:] in json.loads(path[-2][2:])


def without(fields: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The fields after the server took one out of the entry, and what holds nothing then."""
    found = copy.deepcopy(fields)
    steps = [found]
    for key in path[:-1]:
        steps.append(steps[-1][key])
    del steps[-1][path[-1]]
    for parent, key in zip(reversed(steps[:-1]), reversed(path[:-1]), strict=True):
        if not parent[key]:
            del parent[key]
    return found


@pytest.mark.parametrize("case", RECORDED, ids=name)
def test_what_was_applied_is_covered_by_what_the_server_noted(case: dict[str, Any]) -> None:
    assert covers(owned(case), case["applied"])


@pytest.mark.parametrize("case", RECORDED, ids=name)
def test_every_field_that_the_server_takes_away_is_missed(case: dict[str, Any]) -> None:
    """But for the mark with the hash, which is not part of what is planned."""
    fields = owned(case)
    paths = [path for path in nodes(fields) if path[-1] != "f:flowprefill.io/applied" and not is_key(path)]
    covered = [path for path in paths if covers(without(fields, path), case["applied"])]
    # Without other annotations the mark's parent is not planned either.
    assert [path for path in covered if path[-2:] != ("f:metadata", "f:annotations")] == []


@pytest.mark.parametrize("case", RECORDED, ids=name)
def test_a_field_that_is_newly_planned_is_not_covered(case: dict[str, Any]) -> None:
    applied = copy.deepcopy(case["applied"])
    applied["metadata"]["labels"]["new"] = "1"
    assert not covers(owned(case), applied)


def test_a_field_that_is_no_longer_planned_may_still_be_owned() -> None:
    """The hash in the annotation tells that; `covers` is about what is planned."""
    case = next(case for case in RECORDED if case["applied"]["kind"] == "Deployment")
    applied = copy.deepcopy(case["applied"])
    del applied["spec"]["template"]["spec"]["containers"][1]
    assert covers(owned(case), applied)


def test_a_list_item_is_found_by_its_keys_whatever_its_place_and_with_a_key_left_to_its_default() -> None:
    fields = {
        "f:spec": {
            "f:ports": {
                'k:{"port":80,"protocol":"TCP"}': {".": {}, "f:port": {}},
                'k:{"port":53,"protocol":"UDP"}': {".": {}, "f:port": {}, "f:protocol": {}},
            }
        }
    }
    assert covers(fields, {"spec": {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 80}]}})
    assert not covers(fields, {"spec": {"ports": [{"port": 53, "protocol": "TCP"}, {"port": 80}]}})
    assert not covers(fields, {"spec": {"ports": [{"port": 443}]}})


def test_items_of_a_set_are_owned_one_by_one() -> None:
    fields = {"f:metadata": {"f:finalizers": {'v:"a"': {}, 'v:"b"': {}}}}
    assert covers(fields, {"metadata": {"finalizers": ["b", "a"]}})
    assert not covers(fields, {"metadata": {"finalizers": ["a", "c"]}})


def test_an_atomic_list_or_map_is_owned_as_a_whole() -> None:
    fields = {"f:spec": {"f:args": {}, "f:selector": {}}}
    assert covers(fields, {"spec": {"args": ["--one", "--two"], "selector": {"app": "x"}}})
    assert not covers({"f:spec": {"f:args": {}}}, {"spec": {"args": ["--one"], "selector": {"app": "x"}}})


def test_an_empty_map_is_a_field_like_any_other_and_an_empty_list_is_none() -> None:
    fields = {"f:spec": {"f:volumes": {'k:{"name":"tmp"}': {".": {}, "f:emptyDir": {}, "f:name": {}}}}}
    planned = {"spec": {"volumes": [{"name": "tmp", "emptyDir": {}}], "gates": []}}
    assert covers(fields, planned)
    del fields["f:spec"]["f:volumes"]['k:{"name":"tmp"}']["f:emptyDir"]
    assert not covers(fields, planned)


ENTRY = {"manager": MANAGER, "operation": "Apply", "apiVersion": "v1", "fieldsV1": {"f:data": {}}}


@pytest.mark.parametrize(
    ("other", "whose"),
    [
        ({"manager": "kubectl"}, "another manager's"),
        ({"operation": "Update"}, "not applied"),
        ({"subresource": "status"}, "of the status"),
        ({"apiVersion": "v1beta1"}, "of another version, whose fields may have other names"),
    ],
)
def test_only_the_own_applied_fields_of_the_object_itself_count(other: dict[str, str], whose: str) -> None:
    item = {"apiVersion": "v1", "metadata": {"managedFields": [{**ENTRY, **other}]}}
    assert applied_fields(item, MANAGER) is None, whose
    item["metadata"]["managedFields"].append(ENTRY)
    assert applied_fields(item, MANAGER) == {"f:data": {}}


def test_an_object_without_records_has_no_owned_fields() -> None:
    assert applied_fields({"apiVersion": "v1", "metadata": {}}, MANAGER) is None
