"""EndpointSlices as the endpoints they describe. Pure.

The Services of one FlowPrefillService hand their labels down to their slices: `flowprefill.io/role` is on all of them,
`flowprefill.io/revision` on those of workers. A Service may have several slices, and a pod may stand in two of them for
a moment. Source: https://kubernetes.io/docs/concepts/services-networking/endpoint-slices/
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

from flowprefill.proxy.revisions import COLOCATED, DECODE, PREFILL, PROXY
from flowprefill.wire import Endpoint
from flowprefill_crd.labels import ADMIN_PORT, API_PORT, REVISION, ROLE

ROLES = frozenset({PREFILL, DECODE, COLOCATED, PROXY})

T = TypeVar("T")
Many = Annotated[tuple[T, ...], BeforeValidator(lambda value: value or ())]
"""A list that the API writes as null when it is empty."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, validate_by_name=True)


class Metadata(_Part):
    name: str
    resource_version: str = ""
    creation_timestamp: datetime | None = None
    labels: dict[str, str] = Field(default_factory=dict)


class Conditions(_Part):
    """None is "unknown": ready is then taken for true, serving for what ready is, terminating for false."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class TargetRef(_Part):
    kind: str = ""
    name: str = ""


class SliceEndpoint(_Part):
    addresses: Many[str] = ()
    conditions: Annotated[Conditions, BeforeValidator(lambda value: value or {})] = Conditions()
    target_ref: TargetRef | None = None


class SlicePort(_Part):
    name: str | None = None
    port: int | None = None


class Slice(_Part):
    """The part of an EndpointSlice (discovery.k8s.io/v1) that tells where pods are."""

    metadata: Metadata
    address_type: str = "IPv4"
    endpoints: Many[SliceEndpoint] = ()
    ports: Many[SlicePort] = ()

    @property
    def revision(self) -> str:
        return self.metadata.labels.get(REVISION, "")


def endpoints_of(slices: Iterable[Slice]) -> tuple[Endpoint, ...]:
    """The pods in `slices`, each once, the newest revision last.

    Left out are slices of no known role, of workers without a revision and of Services without an API port, and endpoints
    without an address. A pod in two slices counts as ready when one of them says so. A Service without an admin port
    (that of the proxies) has its API port in its place.
    """
    known = sorted(slices, key=lambda each: each.metadata.name)
    created_s = _created_s(known)
    found: dict[tuple[str, str], Endpoint] = {}
    for each in known:
        role = each.metadata.labels.get(ROLE, "")
        ports = {port.name: port.port for port in each.ports}
        api = ports.get(API_PORT)
        if role not in ROLES or api is None or (role != PROXY and not each.revision):
            continue
        for member in each.endpoints:
            if not member.addresses:
                continue
            endpoint = _endpoint(member, role, each, api, ports.get(ADMIN_PORT) or api, created_s)
            other = found.get((role, endpoint.name))
            if other is None or _usable(endpoint) > _usable(other):
                found[role, endpoint.name] = endpoint
    return tuple(sorted(found.values(), key=lambda e: (e.created_s, e.revision, e.role, e.name)))


def _endpoint(
    member: SliceEndpoint, role: str, of: Slice, api: int, admin: int, created_s: dict[str, float]
) -> Endpoint:
    address = member.addresses[0]  # several stand for one pod, and the first is enough
    host = f"[{address}]" if of.address_type == "IPv6" else address
    target = member.target_ref
    conditions = member.conditions
    ready = conditions.ready is not False
    serving = ready if conditions.serving is None else conditions.serving
    terminating = conditions.terminating is True
    return Endpoint(
        name=target.name if target is not None and target.kind == "Pod" else host,
        role=role,
        revision=of.revision,
        address=f"{host}:{api}",
        admin=f"{host}:{admin}",
        ready=serving if terminating else ready,
        terminating=terminating,
        created_s=created_s[of.revision],
    )


def _created_s(slices: Iterable[Slice]) -> dict[str, float]:
    """When each revision came to be: its oldest slice is as old as its Services, later ones only say that it grew."""
    oldest: dict[str, float] = {}
    for each in slices:
        at = each.metadata.creation_timestamp
        at_s = at.timestamp() if at is not None else 0.0
        oldest[each.revision] = min(oldest.get(each.revision, at_s), at_s)
    return oldest


def _usable(endpoint: Endpoint) -> tuple[bool, bool]:
    return not endpoint.terminating, endpoint.ready
