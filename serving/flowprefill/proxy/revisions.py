"""Which pods may serve a request, as pure functions of what discovery reports.

A revision is usable when it has a ready endpoint in both roles (or one colocated endpoint). Each has a mode of its own,
so that a service keeps answering while its mode changes. A request's two legs always go to the same revision.
Terminating and unready endpoints get nothing new.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flowprefill.wire import Endpoint

PREFILL, DECODE, COLOCATED, PROXY = "prefill", "decode", "colocated", "proxy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A usable revision. `first` holds the pods that a request goes to first (prefill, or colocated)."""

    name: str
    first: tuple[Endpoint, ...]
    decode: tuple[Endpoint, ...]

    @property
    def colocated(self) -> bool:
        """Whether its pods do both, so that a request has one leg."""
        return not self.decode


def usable_revisions(endpoints: Sequence[Endpoint], *, own_revision: str = "") -> tuple[Revision, ...]:
    """Usable revisions, our own first, then the newest: by creation time, then the one listed last.

    A proxy is configured for the pods of its own revision (names of the model, keys), so it goes to another's
    only while its own has none to offer.
    """
    by_name: dict[str, list[Endpoint]] = {}
    for endpoint in endpoints:
        if endpoint.role != PROXY:
            by_name.setdefault(endpoint.revision, []).append(endpoint)
    usable = []
    for position, (name, members) in enumerate(by_name.items()):
        taking = [e for e in members if e.ready and not e.terminating]
        colocated = tuple(e for e in taking if e.role == COLOCATED)
        first = colocated or tuple(e for e in taking if e.role == PREFILL)
        decode = () if colocated else tuple(e for e in taking if e.role == DECODE)
        if first and (colocated or decode):
            created_s = max(e.created_s for e in members)
            rank = (name == own_revision, created_s, position)
            usable.append((rank, Revision(name=name, first=first, decode=decode)))
    usable.sort(key=lambda pair: pair[0], reverse=True)
    return tuple(revision for _, revision in usable)


def num_proxies(endpoints: Iterable[Endpoint]) -> int:
    """Proxies that share the pods, this one included: at least 1."""
    return max(sum(1 for e in endpoints if e.role == PROXY and e.ready and not e.terminating), 1)
