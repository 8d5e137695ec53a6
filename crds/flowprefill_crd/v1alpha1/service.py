"""The FlowPrefillService itself."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from flowprefill_crd.base import ApiObject, DnsLabel, DnsSubdomain, ObjectRef
from flowprefill_crd.rules import Rule, Unique
from flowprefill_crd.v1alpha1.engine import Engine
from flowprefill_crd.v1alpha1.model import Model
from flowprefill_crd.v1alpha1.operations import (
    KvTransfer,
    Observability,
    Rollout,
    Security,
    Termination,
    UpgradePolicy,
)
from flowprefill_crd.v1alpha1.roles import Decode, Prefill, Proxy
from flowprefill_crd.v1alpha1.scheduling import Scheduling
from flowprefill_crd.v1alpha1.slo import SloClass, SloClasses
from flowprefill_crd.v1alpha1.status import Status

GROUP = "flowprefill.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "FlowPrefillService"
PLURAL = "flowprefillservices"

Mode = Literal["Disaggregated", "Colocated"]


class Metadata(ApiObject):
    """The parts of a Kubernetes object's metadata that this project reads; the others are dropped."""

    model_config = ConfigDict(extra="ignore", strict=False)

    name: DnsSubdomain
    namespace: DnsLabel = "default"
    uid: str = ""
    generation: int = 1
    resource_version: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


def _longest_startup(spec: Spec) -> int:
    return max(spec.prefill.startup_timeout_seconds, spec.decode.startup_timeout_seconds)


class Spec(ApiObject):
    """What the service is to be."""

    rules: ClassVar = (
        Rule(
            message="in mode Colocated the prefill pods also decode; leave out decode.replicas and decode.autoscaling",
            cel="self.mode != 'Colocated' || !(has(self.decode.replicas) || has(self.decode.autoscaling))",
            holds=lambda s: (
                s.mode != "Colocated" or (s.decode.replicas is None and s.decode.autoscaling is None)
            ),
            field="decode",
        ),
        Rule(
            message="rollout.timeoutSeconds is below the startupTimeoutSeconds of prefill or decode; use at least that",
            cel="self.rollout.timeoutSeconds >= self.prefill.startupTimeoutSeconds && "
            "self.rollout.timeoutSeconds >= self.decode.startupTimeoutSeconds",
            holds=lambda s: s.rollout.timeout_seconds >= _longest_startup(s),
            field="rollout.timeoutSeconds",
            seen=lambda s: str(s.rollout.timeout_seconds),
        ),
        Rule(
            message="engine.kvCacheTokens is below model.maxModelLen, so the longest prompt does not fit; use at least that",
            cel="!has(self.engine.kvCacheTokens) || !has(self.model.maxModelLen) || "
            "self.engine.kvCacheTokens >= self.model.maxModelLen",
            holds=lambda s: (
                s.engine.kv_cache_tokens is None
                or s.model.max_model_len is None
                or s.engine.kv_cache_tokens >= s.model.max_model_len
            ),
            field="engine.kvCacheTokens",
            seen=lambda s: f"{s.engine.kv_cache_tokens} below {s.model.max_model_len}",
        ),
    )

    model: Model
    """The model to serve. Each field says whether it restarts pods."""

    mode: Mode = "Disaggregated"
    """Disaggregated computes prompts and answers in different pods; Colocated does both in the prefill
    pods. Restarts pods."""

    engine: Engine = Engine()
    """The engine inside prefill and decode pods. Restarts pods."""

    slo_classes: SloClasses
    """The promised times to first token. Every request belongs to one class. Applied live."""

    scheduling: Scheduling = Scheduling()
    """How prefill work is ordered, batched and preempted. Each field says whether it restarts pods."""

    prefill: Prefill = Prefill()
    """The pods that compute prompts. Each field says whether it restarts pods."""

    decode: Decode = Decode()
    """The pods that generate answers, in mode Disaggregated. Each field says whether it restarts pods."""

    proxy: Proxy = Proxy()
    """The pods that take requests from clients. Each field says whether it restarts pods."""

    kv_transfer: KvTransfer = KvTransfer()
    """The way of the KV cache from prefill to decode pods. Restarts pods."""

    rollout: Rollout = Rollout()
    """How a new revision replaces the old one. Applied live."""

    upgrade_policy: UpgradePolicy = "Manual"
    """Whether a newer default image of the operator is taken at once (Automatic) or only with the next
    change that restarts pods (Manual). Applied live."""

    observability: Observability = Observability()
    """Metrics, alerts and logs. Each field says whether it restarts pods."""

    security: Security = Security()
    """Who may use the service. Restarts pods."""

    image_pull_secrets: Annotated[tuple[ObjectRef, ...], Field(max_length=8), Unique("name")] = ()
    """Secrets that images are pulled with, in all pods of the service. Restarts pods."""

    paused: bool = False
    """Leave everything in the cluster as it is and only report the status. Applied live."""

    termination: Termination = Termination()
    """The steps in which a pod stops. Restarts pods."""

    @property
    def default_slo_class(self) -> SloClass:
        """The class of requests that name none."""
        return next((c for c in self.slo_classes if c.default), self.slo_classes[0])


class FlowPrefillService(ApiObject):
    """A model served with promises on its time to first token (TTFT): a proxy, prefill pods that let an
    urgent prompt interrupt a long one, and decode pods."""

    api_version: Literal["flowprefill.io/v1alpha1"] = "flowprefill.io/v1alpha1"
    kind: Literal["FlowPrefillService"] = "FlowPrefillService"
    metadata: Metadata
    spec: Spec
    """What the service is to be."""

    status: Status | None = None
    """State of the service, written by the operator alone."""
