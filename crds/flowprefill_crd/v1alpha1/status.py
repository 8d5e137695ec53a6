"""What the operator reports about a service.

Unknown fields are dropped when a status is read: it may come from a newer operator.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StringConstraints

from flowprefill_crd.base import ApiObject
from flowprefill_crd.rules import Unique

Text = Annotated[str, StringConstraints(max_length=1024)]
Name = Annotated[str, StringConstraints(max_length=253)]
Count = Annotated[int, Field(ge=0, le=1_000_000)]
# The API server compares limits as float64, so they stay within 53 bits.
Generation = Annotated[int, Field(ge=0, le=2**53 - 1)]
Timestamp = Annotated[str, StringConstraints(max_length=64), Field(json_schema_extra={"format": "date-time"})]
Percent = Annotated[
    str, StringConstraints(pattern=r"^(100([.]0+)?|[0-9]{1,2}([.][0-9]{1,3})?)$", max_length=8)
]


class StatusObject(ApiObject):
    """An object within the status."""

    model_config = ConfigDict(extra="ignore")


class Condition(StatusObject):
    """One aspect of the service, as kstatus reads it."""

    type: Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9]*$", min_length=1, max_length=64)]
    """What the condition is about: Ready, Accepted, PrefillReady, DecodeReady, ProxyReady, ProfileReady,
    ConfigApplied and others."""

    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""

    reason: Annotated[
        str,
        StringConstraints(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", min_length=1, max_length=128),
    ]
    """The cause in one word, for programs."""

    message: Annotated[str, StringConstraints(max_length=4096)] = ""
    """The cause in a sentence, for people."""

    observed_generation: Generation = 0
    """The metadata.generation that the condition was computed from."""

    last_transition_time: Timestamp
    """When status last changed."""


class RevisionStatus(StatusObject):
    """Which revisions exist."""

    current: Name | None = None
    """The revision that serves, or did last; absent before one has served a token."""

    updating: Name | None = None
    """The revision that is to replace it; absent outside a rollout."""


class RoleStatus(StatusObject):
    """The pods of one role."""

    replicas: Count = 0
    """Pods wanted."""

    ready_replicas: Count = 0
    """Pods that are ready."""

    revision: Name | None = None
    """The revision that these pods belong to."""

    summary: Annotated[str, StringConstraints(max_length=32)] = ""
    """Ready and wanted pods in one text, such as "1/2"."""


class RolesStatus(StatusObject):
    """The pods of each role."""

    prefill: RoleStatus | None = None
    """Prefill pods."""

    decode: RoleStatus | None = None
    """Decode pods; absent in Colocated mode."""

    proxy: RoleStatus | None = None
    """Proxy pods."""


class AttainmentStatus(StatusObject):
    """How well one SLO class is met."""

    name: Annotated[str, StringConstraints(max_length=32)]
    """Name of the class."""

    ttft_milliseconds: Annotated[int, Field(ge=1, le=3_600_000)]
    """Promised time to first token in milliseconds."""

    objective: Percent
    """Percent of requests that must meet it."""

    attainment: Percent | None = None
    """Percent of requests that met it, rounded to 0.1; absent without traffic or when the proxies cannot be
    reached."""

    window_seconds: Annotated[int, Field(ge=1, le=2_592_000)]
    """Seconds that the attainment covers, up to now."""


class ResolvedModel(StatusObject):
    """The model that is served."""

    uri: Annotated[str, StringConstraints(max_length=512)]
    """Where its files come from."""

    revision: Annotated[str, StringConstraints(max_length=128)] | None = None
    """The commit of an hf:// model that all pods of the revision are given: what the asked branch or tag stood for
    when its first pod asked. Absent until a pod has fetched the model, and for other schemes."""

    served_name: Annotated[str, StringConstraints(max_length=128)]
    """Name that clients send as "model"."""


class Status(StatusObject):
    """State of the service, written by the operator alone."""

    observed_generation: Generation = 0
    """The metadata.generation that this status describes."""

    conditions: Annotated[tuple[Condition, ...], Field(max_length=32), Unique("type")] = ()
    """The state of the service in parts; Ready sums them up."""

    revision: RevisionStatus | None = None
    """The revision that serves and the one on its way."""

    url: Text | None = None
    """Where clients in the cluster reach the API."""

    roles: RolesStatus | None = None
    """The pods of each role."""

    loading_since: Timestamp | None = None
    """Since when pods have been loading the model; absent when none is."""

    slo_attainment: Annotated[tuple[AttainmentStatus, ...], Field(max_length=16), Unique("name")] = ()
    """How well each SLO class is met."""

    ttft_summary: Text | None = None
    """Attainment of all classes in one text, such as "chat 99.1%, document 95.0%"."""

    resolved_model: ResolvedModel | None = None
    """The model that is served."""

    upgrade_available: Text | None = None
    """The images that the operator would use now, without those in use; absent when there are none. The next change
    that restarts pods takes them, or upgradePolicy: Automatic."""
