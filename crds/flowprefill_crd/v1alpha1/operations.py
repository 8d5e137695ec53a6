"""How the service is run: KV transfer, rollouts, stopping, observing and access."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from flowprefill_crd.base import ApiObject, DnsSubdomain, LabelKey, LabelValue, SecretKey
from flowprefill_crd.rules import Rule

UpgradePolicy = Literal["Manual", "Automatic"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["json", "text"]

LabelMap = Annotated[dict[LabelKey, LabelValue], Field(max_length=16)]


class KvTransfer(ApiObject):
    """The way of a prompt's KV cache from the prefill pod to the decode pod."""

    rules: ClassVar = (
        Rule(
            message="timeoutSeconds is above leaseSeconds; use at most leaseSeconds",
            cel="self.timeoutSeconds <= self.leaseSeconds",
            holds=lambda k: k.timeout_seconds <= k.lease_seconds,
            field="timeoutSeconds",
            seen=lambda k: f"{k.timeout_seconds} above {k.lease_seconds}",
        ),
    )

    lease_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    """Seconds that a prefill pod keeps a finished prompt's KV cache for a decode pod to pull. Restarts pods."""

    timeout_seconds: Annotated[int, Field(ge=1, le=3600)] = 30
    """Seconds that one pull may take; then it has failed. Restarts pods."""

    max_retries: Annotated[int, Field(ge=0, le=5)] = 1
    """Times that a failed pull is repeated before the request fails. Restarts pods."""


class Rollout(ApiObject):
    """How a new revision replaces the old one."""

    strategy: Literal["Surge", "Recreate"] = "Surge"
    """Surge starts the new revision beside the old one and needs room for both; Recreate stops the old one
    first and serves nothing in between. Applied live."""

    timeout_seconds: Annotated[int, Field(ge=60, le=86_400)] = 3600
    """Seconds after which a revision that is not ready counts as stuck. The old one keeps serving. Applied
    live."""


class Termination(ApiObject):
    """The steps in which a pod stops, in seconds. Their sum and a margin is the pod's grace period."""

    pre_stop_seconds: Annotated[int, Field(ge=0, le=300)] = 5
    """Seconds between the decision to stop a pod and the signal to it, so that endpoints are updated.
    Restarts pods."""

    lame_duck_seconds: Annotated[int, Field(ge=0, le=300)] = 5
    """Seconds after the signal in which new connections are still served, and told to close. Restarts pods."""

    drain_seconds: Annotated[int, Field(ge=0, le=3600)] = 60
    """Most seconds after that in which running requests are finished. Restarts pods."""


class Observability(ApiObject):
    """Metrics, alerts and logs."""

    pod_monitor: bool = True
    """Create a PodMonitor, where the cluster has that API. Applied live."""

    prometheus_rule: bool = True
    """Create a PrometheusRule with recordings and alerts for each SLO class, where the cluster has that
    API. Has no effect yet. Applied live."""

    monitor_labels: LabelMap = Field(default_factory=dict)
    """Labels of the PodMonitor and the PrometheusRule, for a Prometheus that selects by label. Applied live."""

    log_format: LogFormat = "json"
    """Format of the pods' logs: a JSON object a line, or plain text. Restarts pods."""

    log_level: LogLevel = "info"
    """Least severity that is logged. Applied live."""

    per_request_log: bool = False
    """Log one line a request with its class, sizes and times, but no text of prompts or answers. Applied
    live."""


class ApiKeys(ApiObject):
    """A Secret with the keys that clients must present."""

    name: DnsSubdomain
    """Name of the Secret. Restarts pods."""

    key: SecretKey = "keys"
    """Key within the Secret; its value holds one API key a line. Restarts pods."""


class Security(ApiObject):
    """Who may use the service."""

    api_keys_secret_ref: ApiKeys | None = None
    """Secret with the API keys that clients send as a bearer token; no key is asked for when absent.
    Restarts pods."""
