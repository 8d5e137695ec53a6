"""What is known of the cluster, from watches that come late and lists that come in between."""

from __future__ import annotations

from typing import Any

import pytest

from flowprefill_operator.kinds import CONFIG_MAPS, DEPLOYMENTS, PODS
from flowprefill_operator.observe.store import Owner, Store
from support.cluster_objects import owned_object

EXAMPLE: Owner = ("ns", "example")
OTHER: Owner = ("ns", "other")


class Told:
    """A store, and the owners that it has told of since they were last asked for."""

    def __init__(self) -> None:
        self._told: list[Owner] = []
        self.store = Store(self._told.append)

    def owners(self) -> list[Owner]:
        found, self._told[:] = list(self._told), []
        return found

    def names(self, owner: Owner = EXAMPLE) -> set[str]:
        return {name for _, name in self.store.of(owner)}


@pytest.fixture
def told() -> Told:
    return Told()


def config_map(name: str, version: int, *, value: str = "", **more: Any) -> dict[str, Any]:
    return owned_object(CONFIG_MAPS, name, version=version, data={"key": value}, **more)


def value(told: Told, name: str = "a", owner: Owner = EXAMPLE) -> str:
    return told.store.of(owner)[CONFIG_MAPS, name].data["key"]


def test_an_object_is_found_by_its_service_and_its_coming_is_told(told: Told) -> None:
    told.store.put(CONFIG_MAPS, config_map("a", 1))
    assert told.names() == {"a"}
    assert told.owners() == [EXAMPLE]
    assert told.store.owners() == {EXAMPLE}
    assert told.store.uids() == {"uid-a"}
    assert told.store.of(OTHER) == {}


def test_the_newer_of_two_facts_wins_in_whichever_order_they_come(told: Told) -> None:
    """Versions are compared as numbers: 10 is after 9."""
    told.store.put(CONFIG_MAPS, config_map("a", 9, value="old"))
    told.store.put(CONFIG_MAPS, config_map("a", 10, value="new"))
    assert value(told) == "new"
    told.owners()
    told.store.put(CONFIG_MAPS, config_map("a", 9, value="old"))
    told.store.put(CONFIG_MAPS, config_map("a", 10, value="again"))
    assert value(told) == "new"
    assert told.owners() == []


def test_a_delete_is_of_one_object_and_not_of_the_next_one_of_its_name(told: Told) -> None:
    old, new = config_map("a", 5, uid="first"), config_map("a", 8, uid="second")
    told.store.put(CONFIG_MAPS, new)
    told.owners()
    told.store.drop(CONFIG_MAPS, old)
    assert told.names() == {"a"}
    assert told.owners() == []
    told.store.drop(CONFIG_MAPS, new)
    assert told.names() == set()
    assert told.store.owners() == set()
    assert told.owners() == [EXAMPLE]
    told.store.drop(CONFIG_MAPS, new)
    assert told.owners() == []


def test_kinds_namespaces_and_names_are_told_apart(told: Told) -> None:
    told.store.put(CONFIG_MAPS, config_map("a", 1))
    told.store.put(DEPLOYMENTS, owned_object(DEPLOYMENTS, "a", version=2, spec={}))
    elsewhere = config_map("a", 3, uid="elsewhere")
    elsewhere["metadata"]["namespace"] = "far"
    told.store.put(CONFIG_MAPS, elsewhere)
    assert set(told.store.of(EXAMPLE)) == {(CONFIG_MAPS, "a"), (DEPLOYMENTS, "a")}
    assert set(told.store.of(("far", "example"))) == {(CONFIG_MAPS, "a")}
    told.store.forget(CONFIG_MAPS, "ns", "a")
    assert set(told.store.of(EXAMPLE)) == {(DEPLOYMENTS, "a")}
    assert set(told.store.of(("far", "example"))) == {(CONFIG_MAPS, "a")}


def test_an_object_that_changes_its_service_is_told_to_both(told: Told) -> None:
    told.store.put(CONFIG_MAPS, config_map("a", 1))
    told.owners()
    told.store.put(CONFIG_MAPS, config_map("a", 2, labels={"flowprefill.io/service": "other"}))
    assert (told.names(EXAMPLE), told.names(OTHER)) == (set(), {"a"})
    assert set(told.owners()) == {EXAMPLE, OTHER}


def test_a_list_tells_what_is_new_what_changed_and_what_has_vanished(told: Told) -> None:
    for name, version in (("kept", 1), ("changed", 2), ("vanished", 3)):
        told.store.put(CONFIG_MAPS, config_map(name, version))
    told.store.put(PODS, owned_object(PODS, "pod", version=4))
    told.owners()
    items = [config_map("kept", 1), config_map("changed", 7, value="new"), config_map("new", 8)]
    assert told.store.replace(CONFIG_MAPS, items, "9", namespace=None) == 3
    assert told.names() == {"kept", "changed", "new", "pod"}
    assert value(told, "changed") == "new"
    assert told.owners() == [EXAMPLE] * 3
    assert told.store.replace(CONFIG_MAPS, items, "10", namespace=None) == 0
    assert told.owners() == []


def test_what_was_made_after_a_list_has_not_vanished(told: Told) -> None:
    """The operator writes while a list of an earlier moment is still on its way."""
    told.store.put(CONFIG_MAPS, config_map("young", 12))
    assert told.store.replace(CONFIG_MAPS, [], "11", namespace=None) == 0
    assert told.names() == {"young"}
    assert told.store.replace(CONFIG_MAPS, [], "12", namespace=None) == 1
    assert told.names() == set()


def test_a_list_of_one_namespace_says_nothing_of_another(told: Told) -> None:
    elsewhere = config_map("b", 2)
    elsewhere["metadata"]["namespace"] = "far"
    told.store.put(CONFIG_MAPS, config_map("a", 1))
    told.store.put(CONFIG_MAPS, elsewhere)
    told.store.replace(CONFIG_MAPS, [], "9", namespace="ns")
    assert told.names(EXAMPLE) == set()
    assert told.names(("far", "example")) == {"b"}


def test_what_was_handed_out_does_not_change_underneath(told: Told) -> None:
    told.store.put(CONFIG_MAPS, config_map("a", 1))
    before = told.store.of(EXAMPLE)
    told.store.put(CONFIG_MAPS, config_map("b", 2))
    told.store.forget(CONFIG_MAPS, "ns", "a")
    assert set(before) == {(CONFIG_MAPS, "a")}
