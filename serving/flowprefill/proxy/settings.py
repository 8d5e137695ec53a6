"""What the proxy runs with, as values made from the two configuration documents."""

from __future__ import annotations

from dataclasses import dataclass

from flowprefill.proxy.slo import SloClass, SloClasses
from flowprefill.scheduling.settings import Ageing, PolicyName, Preemption
from flowprefill_crd import LiveConfig, PodConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """What holds from start to stop. Times in seconds, sizes in bytes.

    `pod_wait_s` bounds how long a request waits for any pod to appear; `connect_timeout_s` the making of one
    connection to a pod; `request_timeout_s` a whole request, from complete body to last byte; `round_trip_s` a round
    trip that the operator asks for.
    """

    service: str
    namespace: str
    revision: str
    served_name: str
    model_uri: str = ""
    model_revision: str | None = None
    colocated: bool = False
    max_model_len: int | None = None
    block_size: int = 16
    api_keys_file: str | None = None
    queue_limit: int = 10_000
    max_body_bytes: int = 16 * 2**20
    request_timeout_s: float = 600.0
    pod_wait_s: float = 5.0
    connect_timeout_s: float = 5.0
    round_trip_s: float = 30.0
    max_connections: int = 10_000
    lame_duck_s: float = 5.0
    drain_s: float = 60.0
    kv_lease_s: float = 60.0
    json_logs: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSettings:
    """What may change while the proxy runs."""

    generation: int
    classes: SloClasses
    policy: PolicyName = "s-edf"
    batch_token_budget: int = 2048
    preemption: Preemption = "operator"
    max_suspended: int = 8
    ageing: Ageing | None
    log_level: str = "info"
    per_request_log: bool = False


def proxy_settings(config: PodConfig) -> ProxySettings:
    """The proxy's part of the pod configuration."""
    return ProxySettings(
        service=config.service,
        namespace=config.namespace,
        revision=config.revision,
        served_name=config.model.served_name,
        model_uri=config.model.uri,
        model_revision=config.model.revision,
        colocated=config.mode == "Colocated",
        max_model_len=config.model.max_model_len,
        block_size=config.engine.block_size,
        api_keys_file=config.api_keys_file,
        queue_limit=config.proxy.queue_limit,
        max_body_bytes=config.proxy.max_body_bytes,
        request_timeout_s=float(config.proxy.request_timeout_seconds),
        lame_duck_s=float(config.termination.lame_duck_seconds),
        drain_s=float(config.termination.drain_seconds),
        kv_lease_s=float(config.kv_transfer.lease_seconds),
        json_logs=config.log_format == "json",
    )


def live_settings(config: LiveConfig) -> LiveSettings:
    """The proxy's part of the live configuration."""
    classes = {
        c.name: SloClass(
            name=c.name,
            ttft_s=c.ttft_slo_s,
            min_ttft_s=c.min_ttft_slo_s,
            max_ttft_s=c.max_ttft_slo_s,
            objective=float(c.objective) / 100,
            weight=float(c.weight),
            shed_when_infeasible=c.shed_when_infeasible,
        )
        for c in config.slo_classes
    }
    tiers = {tier: c.name for c in config.slo_classes for tier in c.service_tiers}
    ageing = config.ageing
    return LiveSettings(
        generation=config.generation,
        classes=SloClasses(classes=classes, default=config.default_slo_class.name, service_tiers=tiers),
        policy=config.policy,
        batch_token_budget=config.batch_token_budget,
        preemption=config.preemption,
        max_suspended=config.max_suspended,
        ageing=Ageing(factor=float(ageing.factor), share=ageing.share_percent / 100)
        if ageing.enabled
        else None,
        log_level=config.log_level,
        per_request_log=config.per_request_log,
    )
