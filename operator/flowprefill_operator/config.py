"""The operator's own configuration: one YAML file, which the chart renders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from flowprefill_crd import InvalidConfig, Problem
from flowprefill_crd.base import DnsLabel, DnsSubdomain, ImageName
from flowprefill_crd.parse import problems_of, shown
from flowprefill_crd.rules import Rule, Rules, Unique
from flowprefill_operator.settings import PlanSettings


class _Part(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",
        frozen=True,
        validate_by_alias=True,
        validate_by_name=False,
        use_attribute_docstrings=True,
    )


_SELECTORS = frozenset({"podSelector", "namespaceSelector", "ipBlock"})
_PEER = Rule(
    message="use one or more of podSelector, namespaceSelector and ipBlock, each an object",
    cel="",
    holds=lambda peer: (
        bool(peer) and peer.keys() <= _SELECTORS and all(isinstance(v, dict) for v in peer.values())
    ),
    seen=shown,
)
"""A NetworkPolicyPeer; what its selectors hold is checked by the API server."""


class Images(_Part):
    """Images of the pods that the operator plans; this release's own when left out."""

    torch: ImageName | None = None
    simulated: ImageName | None = None
    vllm: ImageName | None = None
    proxy: ImageName | None = None


class LeaderElection(_Part):
    """One operator at a time works; the others stand by."""

    enabled: bool = True
    lease_name: DnsSubdomain = "flowprefill-operator"
    lease_namespace: DnsLabel | None = None
    """Namespace of the Lease; the operator's own (POD_NAMESPACE) when left out."""

    lease_seconds: Annotated[int, Field(ge=3, le=300)] = 15
    """How long a leader that no longer renews its Lease keeps it."""


class OperatorConfig(_Part):
    """What the operator reads once at its start."""

    namespaces: Annotated[tuple[DnsLabel, ...], Field(max_length=1000), Unique()] = ()
    """Namespaces to serve; empty is every namespace of the cluster."""

    images: Images = Images()
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    image_pull_secrets: Annotated[tuple[DnsSubdomain, ...], Field(max_length=8)] = ()
    """Names of Secrets that serving pods pull images with; they must exist in the service's namespace. Like other
    settings of pods they reach a service with its next revision."""

    network_policy: bool = True
    """Create NetworkPolicies for the pods of services."""

    monitoring_from: Annotated[tuple[Annotated[dict[str, Any], Rules(_PEER)], ...], Field(max_length=32)] = ()
    """NetworkPolicyPeers that may reach the pods' admin ports, besides the operator and the service's own pods."""

    leader_election: LeaderElection = LeaderElection()
    resync_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    """Seconds between two looks at everything, which also finds what watches have missed."""

    log_format: Literal["json", "text"] = "json"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8080
    """Port of /healthz, /readyz and /metrics; 0 lets the system choose."""

    def plan_settings(self, *, namespace: str | None) -> PlanSettings:
        """How services are planned. `namespace` is the operator's own; None outside a cluster."""
        own = PlanSettings()
        images = {name: image for name, image in self.images.model_dump().items() if image is not None}
        proxy = images.pop("proxy", own.proxy_image)
        return PlanSettings(
            images={**own.images, **images},
            proxy_image=proxy,
            image_pull_policy=self.image_pull_policy,
            image_pull_secrets=self.image_pull_secrets,
            network_policy=self.network_policy,
            monitoring_from=self.monitoring_from,
            operator_namespace=namespace,
        )


def load_config(path: Path | None) -> OperatorConfig:
    """The configuration in a YAML file, or the defaults without one.

    Raises `InvalidConfig`, whose message lists every problem, and `OSError` when the file cannot be read.
    """
    if path is None:
        return OperatorConfig()
    try:
        body = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except UnicodeDecodeError as error:
        raise InvalidConfig([Problem(source=str(path), path="", message="is not UTF-8 text")]) from error
    except yaml.YAMLError as error:
        raise InvalidConfig([Problem(source=str(path), path="", message=f"is not YAML: {error}")]) from error
    if not isinstance(body, dict):
        message = f"{shown(body)} is not accepted; use a mapping such as namespaces: []"
        raise InvalidConfig([Problem(source=str(path), path="", message=message)])
    try:
        return OperatorConfig.model_validate(body)
    except ValidationError as error:
        raise InvalidConfig(problems_of(error, OperatorConfig, source=str(path))) from error
