"""The FlowPrefillServices that the operator knows, as the API server last told them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flowprefill_operator.controller.queue import Key
from flowprefill_operator.names import label_value
from flowprefill_operator.observe.store import Owner


class Services:
    """Services by namespace and name, and by the label that their objects carry. Event-loop thread only."""

    def __init__(self) -> None:
        self._bodies: dict[Key, Mapping[str, Any]] = {}
        self._names: dict[Owner, Key] = {}

    def __iter__(self) -> Iterator[Key]:
        return iter(tuple(self._bodies))

    def __len__(self) -> int:
        return len(self._bodies)

    def get(self, key: Key) -> Mapping[str, Any] | None:
        return self._bodies.get(key)

    def key_of(self, owner: Owner) -> Key | None:
        """The service that objects with this label belong to."""
        return self._names.get(owner)

    def put(self, body: Mapping[str, Any]) -> Key:
        """The service is like this now, unless something newer is known."""
        meta = body["metadata"]
        key = (str(meta["namespace"]), str(meta["name"]))
        known = self._bodies.get(key)
        if known is None or _version(known) < _version(body):
            trimmed = {name: value for name, value in meta.items() if name != "managedFields"}
            self._bodies[key] = {**body, "metadata": trimmed}
            self._names[owner_of(key)] = key
        return key

    def drop(self, key: Key, uid: str | None = None) -> None:
        """The service is gone; with `uid`, only if it is this one."""
        known = self._bodies.get(key)
        if known is not None and (uid is None or known["metadata"].get("uid") == uid):
            del self._bodies[key]
            del self._names[owner_of(key)]

    def replace(self, bodies: Iterable[Mapping[str, Any]], version: str, namespace: str | None) -> list[Key]:
        """All services, in one namespace or in all, at a resource version; those that are gone."""
        seen = {self.put(body) for body in bodies}
        gone: list[Key] = []
        for key in self:
            known = self._bodies[key]
            if key in seen or (namespace is not None and key[0] != namespace):
                continue
            if _version(known) <= int(version):
                self.drop(key)
                gone.append(key)
        return gone


def owner_of(key: Key) -> Owner:
    """The label under which a service's objects are found."""
    return (key[0], label_value(key[1]))


def _version(body: Mapping[str, Any]) -> int:
    return int(body["metadata"]["resourceVersion"])
