"""Strategic merge of a user's pod changes; expected values follow kubernetes.io, "Update API Objects in Place Using
kubectl patch", for PodSpec."""

from __future__ import annotations

from typing import Any

import pytest

from flowprefill_operator.resources.merge import merge

BASE: dict[str, Any] = {
    "containers": [
        {
            "name": "a",
            "image": "one",
            "args": ["x"],
            "env": [{"name": "K", "value": "1"}, {"name": "L", "value": "2"}],
        },
        {"name": "b"},
    ],
    "securityContext": {"runAsUser": 1, "fsGroup": 2},
}


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        (
            {"containers": [{"name": "a", "image": "two"}]},
            [BASE["containers"][0] | {"image": "two"}, {"name": "b"}],
        ),
        ({"containers": [{"name": "c"}]}, [*BASE["containers"], {"name": "c"}]),
        ({"containers": [{"name": "b", "$patch": "delete"}]}, [BASE["containers"][0]]),
        (
            {"containers": [{"name": "a", "$patch": "replace", "image": "z"}]},
            [{"name": "a", "image": "z"}, {"name": "b"}],
        ),
        (
            {"containers": [{"name": "a", "args": ["y"]}]},
            [BASE["containers"][0] | {"args": ["y"]}, {"name": "b"}],
        ),
    ],
    ids=["change", "add", "delete", "replace", "plain lists are replaced"],
)
def test_containers_are_merged_by_name(patch: dict[str, Any], expected: list[Any]) -> None:
    assert merge(BASE, patch)["containers"] == expected


def test_environment_variables_inside_a_container_are_merged_by_name() -> None:
    merged = merge(
        BASE,
        {"containers": [{"name": "a", "env": [{"name": "K", "value": "9"}, {"name": "M", "value": "3"}]}]},
    )
    containers: Any = merged["containers"]
    assert [(e["name"], e["value"]) for e in containers[0]["env"]] == [("K", "9"), ("L", "2"), ("M", "3")]


def test_null_takes_a_field_away_and_mappings_keep_the_rest() -> None:
    assert merge(BASE, {"securityContext": {"runAsUser": None}})["securityContext"] == {"fsGroup": 2}


def test_nothing_of_the_base_is_changed() -> None:
    merge(BASE, {"containers": [{"name": "a", "env": [{"name": "K", "value": "9"}]}]})
    assert BASE["containers"][0]["env"][0]["value"] == "1"
