"""What holds for all services alike: which APIs the cluster has, what the operator may not do, the CRD's release."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from flowprefill_operator.kinds import SERVICES, Kind

CRD_MISSING = (
    "the CustomResourceDefinition of FlowPrefillServices is not installed; install it with the chart"
)


@dataclass(slots=True)
class Surroundings:
    """Found by each look at everything. Event-loop thread only."""

    absent: set[Kind] = field(default_factory=set)
    """Optional kinds that the cluster does not serve."""

    denied: dict[str, set[str]] = field(default_factory=dict)
    """Resource to verbs of reading that were refused."""

    schema_outdated: bool = False
    installed: bool = True
    """Whether the cluster serves the API of services."""

    looked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once everything has been looked at."""

    @property
    def synced(self) -> bool:
        return self.looked.is_set()

    def serves(self, kind: Kind) -> bool:
        return kind not in self.absent

    def unready(self) -> str | None:
        """Why no service can be served; None when all can."""
        if not self.synced:
            return "not synced yet"
        if not self.installed:
            return CRD_MISSING
        if "list" in self.denied.get(SERVICES.resource, ()):
            return f"the operator may not list {SERVICES.resource}; grant it, as the chart does"
        return None

    def deny(self, verb: str, kind: Kind) -> None:
        self.denied.setdefault(kind.resource, set()).add(verb)

    def allow(self, verb: str, kind: Kind) -> None:
        verbs = self.denied.get(kind.resource, set())
        verbs.discard(verb)
        if not verbs:
            self.denied.pop(kind.resource, None)

    def forbidden(self) -> tuple[tuple[str, str], ...]:
        """(verb, resource) pairs in a fixed order."""
        return tuple(_pairs(self.denied.items()))


def _pairs(denied: Iterable[tuple[str, set[str]]]) -> list[tuple[str, str]]:
    return sorted((verb, resource) for resource, verbs in denied for verb in verbs)
