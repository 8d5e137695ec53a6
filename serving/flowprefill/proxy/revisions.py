"""Which pods may serve a request, as pure functions of what discovery reports.

A revision is usable when it has a ready endpoint in both roles (or one colocated endpoint). Each has a mode of its own,
so that a service keeps answering while its mode changes. A request's two legs always go to the same revision.
Unready endpoints get nothing new, and terminating ones only while no revision is usable without them: they serve until
their lame duck is over, and with one replica their successor may still be loading.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flowprefill.wire import Endpoint

PREFILL, DECODE, COLOCATED, PROXY = "prefill", "decode", "colocated", "proxy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A usable revision. `first` holds the pods that a request goes to first (prefill, or colocated).

    `leaving` says that in some role only terminating pods are left.
    """

    name: str
    first: tuple[Endpoint, ...]
    decode: tuple[Endpoint, ...]
    leaving: bool = False

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
    ranked = []
    for position, (name, members) in enumerate(by_name.items()):
        revision = _revision(name, members)
        if revision is not None:
            created_s = max(e.created_s for e in members)
            ranked.append(((name == own_revision, created_s, position), revision))
    ranked.sort(key=lambda pair: pair[0], reverse=True)
    usable = tuple(revision for _, revision in ranked)
    return tuple(revision for revision in usable if not revision.leaving) or usable


def _revision(name: str, members: Sequence[Endpoint]) -> Revision | None:
    """The pods of a revision that may get requests; None unless every role has some."""
    serving = [e for e in members if e.ready]

    def of(role: str) -> tuple[Endpoint, ...]:
        pods = tuple(e for e in serving if e.role == role)
        return tuple(e for e in pods if not e.terminating) or pods

    colocated = of(COLOCATED)
    first, decode = (colocated, ()) if colocated else (of(PREFILL), of(DECODE))
    if not first or not (colocated or decode):
        return None
    leaving = any(pods and pods[0].terminating for pods in (first, decode))
    return Revision(name=name, first=first, decode=decode, leaving=leaving)


def num_proxies(endpoints: Iterable[Endpoint]) -> int:
    """Proxies that share the pods, this one included: at least 1."""
    return max(sum(1 for e in endpoints if e.role == PROXY and e.ready and not e.terminating), 1)
