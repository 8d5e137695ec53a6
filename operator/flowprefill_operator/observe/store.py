"""What the operator knows of the cluster: fed by watches and by lists, read by every pass.

A list also tells what is gone, which a watch that was cut does not. Newer facts win: resource versions of one API
server grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flowprefill_operator import labels
from flowprefill_operator.kinds import Kind
from flowprefill_operator.observe.observed import Key, Observed, observe

Owner = tuple[str, str]
"""Namespace, and label value of the service that an object belongs to."""


class Store:
    """Objects by the service that they say they belong to. Event-loop thread only."""

    def __init__(self, changed: Callable[[Owner], None]) -> None:
        """`changed` is called with the owner of every object that came, went or changed."""
        self._changed = changed
        self._objects: dict[Owner, dict[Key, Observed]] = {}
        self._owners: dict[tuple[Kind, str, str], Owner] = {}

    def of(self, owner: Owner) -> Mapping[Key, Observed]:
        """What belongs to a service, as of now."""
        return dict(self._objects.get(owner, {}))

    def owners(self) -> set[Owner]:
        """Every service that something belongs to."""
        return set(self._objects)

    def uids(self) -> set[str]:
        """Of everything that is known."""
        return {item.uid for members in self._objects.values() for item in members.values()}

    def put(self, kind: Kind, item: Mapping[str, Any]) -> Observed:
        """The object is like this now, unless something newer is known; what is seen of it."""
        found = observe(kind, item)
        self._put(found)
        return found

    def drop(self, kind: Kind, item: Mapping[str, Any]) -> None:
        """The object is gone, or no longer says that it is ours."""
        meta = item["metadata"]
        found = self._find(kind, meta["namespace"], meta["name"])
        if found is not None and found.uid == meta["uid"]:
            self._remove(found)

    def forget(self, kind: Kind, namespace: str, name: str) -> None:
        """The object was deleted by us."""
        found = self._find(kind, namespace, name)
        if found is not None:
            self._remove(found)

    def replace(
        self, kind: Kind, items: Iterable[Mapping[str, Any]], version: str, *, namespace: str | None
    ) -> int:
        """All objects of a kind, in one namespace or in all, at a resource version. How many facts were news."""
        news = 0
        seen: set[tuple[str, str]] = set()
        for item in items:
            found = observe(kind, item)
            seen.add((found.namespace, found.name))
            news += self._put(found)
        for at in [at for at in self._owners if at[0] == kind and at[1:] not in seen]:
            if namespace is not None and at[1] != namespace:
                continue
            known = self._objects[self._owners[at]][(kind, at[2])]
            if not _newer(known.resource_version, version):
                self._remove(known)
                news += 1
        return news

    def _find(self, kind: Kind, namespace: str, name: str) -> Observed | None:
        owner = self._owners.get((kind, namespace, name))
        return None if owner is None else self._objects[owner][(kind, name)]

    def _put(self, found: Observed) -> bool:
        owner = (found.namespace, found.labels.get(labels.SERVICE, ""))
        known = self._find(found.kind, found.namespace, found.name)
        if known is not None:
            if not _newer(found.resource_version, known.resource_version):
                return False
            before = self._owners[(found.kind, found.namespace, found.name)]
            if before != owner:
                self._remove(known)
        self._owners[(found.kind, found.namespace, found.name)] = owner
        self._objects.setdefault(owner, {})[found.key] = found
        self._changed(owner)
        return True

    def _remove(self, known: Observed) -> None:
        owner = self._owners.pop((known.kind, known.namespace, known.name))
        members = self._objects[owner]
        del members[known.key]
        if not members:
            del self._objects[owner]
        self._changed(owner)


def _newer(one: str, other: str) -> bool:
    """Whether the first resource version is later. Kubernetes (KEP-5504) lets clients compare them as numbers."""
    return int(one) > int(other)
