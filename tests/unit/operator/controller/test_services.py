"""The services that the operator knows."""

from __future__ import annotations

from typing import Any

import pytest

from flowprefill_operator.controller.services import Services, owner_of
from support.services import document

KEY = ("ns", "example")


def body(version: int, *, name: str = "example", uid: str = "first", **spec: Any) -> dict[str, Any]:
    found = document(namespace="ns", uid=uid, resourceVersion=str(version), managedFields=[{"manager": "x"}])
    found["metadata"]["name"] = name
    found["spec"] |= spec
    return found


@pytest.fixture
def services() -> Services:
    return Services()


def test_a_service_is_found_by_its_name_and_by_the_label_of_its_objects(services: Services) -> None:
    assert services.put(body(1)) == KEY
    assert list(services) == [KEY]
    assert services.key_of(("ns", "example")) == KEY
    assert services.key_of(("far", "example")) is None


def test_a_long_name_is_found_by_the_label_that_it_is_shortened_to(services: Services) -> None:
    key = services.put(body(1, name="x" * 100))
    owner = owner_of(key)
    assert len(owner[1]) <= 63
    assert services.key_of(owner) == key


def test_fields_that_only_the_api_server_reads_are_not_kept(services: Services) -> None:
    services.put(body(1))
    found = services.get(KEY)
    assert found is not None
    assert "managedFields" not in found["metadata"]
    assert found["metadata"]["uid"] == "first"


def test_the_newer_of_two_states_wins(services: Services) -> None:
    services.put(body(10, paused=True))
    services.put(body(9, paused=False))
    found = services.get(KEY)
    assert found is not None
    assert found["spec"]["paused"] is True


def test_a_delete_is_of_one_service_and_not_of_the_next_one_of_its_name(services: Services) -> None:
    services.put(body(10, uid="second"))
    services.drop(KEY, "first")
    assert services.get(KEY) is not None
    services.drop(KEY, "second")
    assert services.get(KEY) is None
    assert services.key_of(KEY) is None
    services.drop(KEY)
    assert len(services) == 0


def test_a_list_tells_what_has_vanished_but_not_of_what_came_later_or_lives_elsewhere(
    services: Services,
) -> None:
    services.put(body(5, name="vanished"))
    services.put(body(6, name="kept"))
    services.put(body(12, name="young"))
    elsewhere = body(3, name="elsewhere")
    elsewhere["metadata"]["namespace"] = "far"
    services.put(elsewhere)
    services.replace([body(6, name="kept")], "11", "ns")
    assert {name for _, name in services} == {"kept", "young", "elsewhere"}
    services.replace([body(6, name="kept")], "12", None)
    assert {name for _, name in services} == {"kept"}
