"""The way from the Gateways of a cluster to the proxies."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from flowprefill_crd.base import HOSTNAME_PATTERN, ApiObject, DnsLabel, DnsSubdomain
from flowprefill_crd.rules import Rule, Rules, Unique


class ParentRef(ApiObject):
    """A Gateway that a route is attached to."""

    name: DnsSubdomain
    """Name of the Gateway. Applied live."""

    namespace: DnsLabel | None = None
    """Namespace of the Gateway; the service's own when absent. Applied live."""

    section_name: DnsSubdomain | None = None
    """One listener of the Gateway; all that match when absent. Applied live."""

    port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """Only listeners on this port; those on any port when absent. Applied live."""


Hostname = Annotated[str, StringConstraints(pattern=HOSTNAME_PATTERN, min_length=1, max_length=253)]


def _parents_are_distinct(parents: tuple[ParentRef, ...]) -> bool:
    """Whether references to one Gateway name different listeners, as the Gateway API asks."""
    sections: dict[tuple[str, str | None], list[str | None]] = {}
    for parent in parents:
        sections.setdefault((parent.name, parent.namespace), []).append(parent.section_name)
    return all(
        len(found) == 1 or (None not in found and len(set(found)) == len(found))
        for found in sections.values()
    )


_SAME_GATEWAY = (
    "q.name == p.name && (has(q.__namespace__) ? q.__namespace__ : '') == "
    "(has(p.__namespace__) ? p.__namespace__ : '')"
)

PARENTS_RULE = Rule(
    message="two parentRefs name the same Gateway; give each a sectionName of its own",
    cel=f"self.all(p, self.filter(q, {_SAME_GATEWAY}).size() == 1 || has(p.sectionName) && "
    f"self.filter(q, {_SAME_GATEWAY} && (!has(q.sectionName) || q.sectionName == p.sectionName)).size() == 1)",
    holds=_parents_are_distinct,
)


class HttpRoute(ApiObject):
    """The way from Gateways to the proxies, where the cluster has the Gateway API."""

    parent_refs: Annotated[tuple[ParentRef, ...], Field(min_length=1, max_length=8), Rules(PARENTS_RULE)]
    """Gateways that the route is attached to. Applied live."""

    hostnames: Annotated[tuple[Hostname, ...], Field(max_length=16), Unique()] = ()
    """Host names that the route answers to, such as "llm.example.com" or "*.example.com"; any when empty.
    Applied live."""
