"""The two documents that pods read.

`PodConfig` holds what pods read once at their start: it never changes within a revision. `LiveConfig`
holds what running pods take over at once. Operator and pods may be of different versions, in either
order, so both readers drop unknown fields and every field that came later has a default.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from flowprefill_crd.errors import InvalidConfig, Problem
from flowprefill_crd.parse import field_path, shown
from flowprefill_crd.v1alpha1.engine import Dtype, EngineType
from flowprefill_crd.v1alpha1.operations import LogFormat, LogLevel
from flowprefill_crd.v1alpha1.scheduling import Policy, Preemption
from flowprefill_crd.v1alpha1.service import FlowPrefillService, Mode

API_KEYS_FILE = "/etc/flowprefill/api-keys/keys"
"""Where pods find the API keys, one a line, when the service asks for them."""

PROFILE_FILE = "/etc/flowprefill/profile/profile.json"
"""Where prefill pods find the predictor's profile, when the service names one or asks for a profiling Job."""

PositiveInt = Annotated[int, Field(ge=1)]
Seconds = Annotated[int, Field(ge=0)]


class Part(BaseModel):
    """A part of a document: snake_case in Python, camelCase in JSON."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        frozen=True,
        extra="ignore",
        strict=True,
        use_attribute_docstrings=True,
    )


class Document(Part):
    """A whole document."""

    title: ClassVar[str]

    def to_json(self) -> str:
        """The document as JSON text: sorted and indented, so that equal documents are equal texts."""
        body = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return json.dumps(body, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The document in a JSON text. Raises `InvalidConfig`, whose message lists every problem."""
        try:
            return cls.model_validate_json(text, by_alias=True, by_name=False)
        except ValidationError as error:
            raise InvalidConfig([_problem(dict(details), cls.title) for details in error.errors()]) from error


def _problem(details: dict[str, Any], title: str) -> Problem:
    match details["type"]:
        case "json_invalid":
            message = details["msg"]
        case "missing":
            message = "is missing"
        case "value_error":
            message = str(details["ctx"]["error"])
        case _:
            message = f"{shown(details['input'])} is not accepted; {details['msg']}"
    return Problem(source=title, path=field_path(details["loc"]), message=message)


class PodModel(Part):
    """The model to load."""

    uri: str
    """Where its files come from, as in the spec."""

    revision: str | None = None
    """Branch, tag or commit of an hf:// model; None for other schemes."""

    served_name: str
    """Name that clients send as "model"."""

    max_model_len: PositiveInt | None = None
    """Most tokens of prompt and answer together; None is the model's own limit."""


class PodEngine(Part):
    """The engine to run, as in `spec.engine`."""

    type: EngineType
    args: tuple[str, ...] = ()
    dtype: Dtype = "auto"
    kv_cache_tokens: PositiveInt | None = None
    block_size: PositiveInt = 16
    threads: PositiveInt = 1
    operator_tile_tokens: PositiveInt | None = None
    max_gap_milliseconds: PositiveInt = 20


class PodPredictor(Part):
    """How a prefill pod comes to its first prediction of prefill times."""

    warmup: bool = True
    """Measure prefill times before the pod is ready."""

    profile_file: str | None = None
    """Path of a profile to start from; None when there is none."""


class PodPrefill(Part):
    """Settings of prefill pods."""

    tensor_parallel_size: PositiveInt = 1


class PodDecode(Part):
    """Settings of decode pods."""

    tensor_parallel_size: PositiveInt = 1
    max_batch_size: PositiveInt = 32
    """Most sequences decoded at the same time."""


class PodProxy(Part):
    """Limits of the proxy."""

    queue_limit: PositiveInt = 10_000
    max_body_bytes: PositiveInt = 16_777_216
    request_timeout_seconds: PositiveInt = 600


class PodKvTransfer(Part):
    """The way of the KV cache from prefill to decode pods, as in `spec.kvTransfer`."""

    lease_seconds: PositiveInt = 60
    timeout_seconds: PositiveInt = 30
    max_retries: Annotated[int, Field(ge=0)] = 1


class PodTermination(Part):
    """The steps in which a pod stops, as in `spec.termination`."""

    pre_stop_seconds: Seconds = 5
    lame_duck_seconds: Seconds = 5
    drain_seconds: Seconds = 60


class PodConfig(Document):
    """What a pod reads once at its start. The same for all roles of one revision."""

    title: ClassVar[str] = "pod configuration"

    service: str
    """Name of the FlowPrefillService."""

    namespace: str
    """Its namespace."""

    revision: str
    """The revision that the pod belongs to."""

    mode: Mode
    """Whether prefill and decode run in different pods."""

    model: PodModel
    engine: PodEngine
    predictor: PodPredictor = PodPredictor()
    prefill: PodPrefill = PodPrefill()
    decode: PodDecode = PodDecode()
    proxy: PodProxy = PodProxy()
    kv_transfer: PodKvTransfer = PodKvTransfer()
    termination: PodTermination = PodTermination()

    api_keys_file: str | None = None
    """Path of the file with the API keys, one a line; None when clients need no key."""

    log_format: LogFormat = "json"
    """Format of the pod's log."""


class LiveSloClass(Part):
    """One SLO class with every default filled in. Times in milliseconds."""

    name: str
    ttft_milliseconds: PositiveInt
    tbt_milliseconds: PositiveInt | None = None
    """Wanted time between two tokens; None is no target."""

    objective: str = "90"
    """Percent of requests that must meet the target, a decimal string."""

    min_ttft_milliseconds: PositiveInt
    """Smallest target that a request may ask for."""

    max_ttft_milliseconds: PositiveInt
    """Largest target that a request may ask for."""

    weight: PositiveInt = 1
    default: bool = False
    """Whether requests that name no class belong here; true for exactly one class."""

    shed_when_infeasible: bool = False
    service_tiers: tuple[str, ...] = ()

    @property
    def ttft_slo_s(self) -> float:
        """The target in seconds."""
        return self.ttft_milliseconds / 1000

    @property
    def tbt_slo_s(self) -> float | None:
        """The target between two tokens in seconds."""
        return None if self.tbt_milliseconds is None else self.tbt_milliseconds / 1000

    @property
    def min_ttft_slo_s(self) -> float:
        """Smallest target that a request may ask for, in seconds."""
        return self.min_ttft_milliseconds / 1000

    @property
    def max_ttft_slo_s(self) -> float:
        """Largest target that a request may ask for, in seconds."""
        return self.max_ttft_milliseconds / 1000


class LiveAgeing(Part):
    """Service for requests that are very late already, as in `spec.scheduling.ageing`."""

    enabled: bool = True
    factor: PositiveInt = 4
    share_percent: PositiveInt = 5


class LiveConfig(Document):
    """What running pods take over at once."""

    title: ClassVar[str] = "live configuration"

    generation: Annotated[int, Field(ge=0)]
    """The metadata.generation of the service that this document states."""

    slo_classes: Annotated[tuple[LiveSloClass, ...], Field(min_length=1)]
    """In the order of the spec; exactly one is the default."""

    policy: Policy = "s-edf"
    batch_token_budget: PositiveInt = 2048
    preemption: Preemption = "operator"
    chunk_tokens: PositiveInt | None = None
    """Most tokens in one forward pass; None leaves prompts whole."""

    max_suspended: Annotated[int, Field(ge=0)] = 8
    recompute_suspended_under_pressure: bool = True
    queue_limit: PositiveInt = 4096
    """Most waiting requests in one prefill pod."""

    ageing: LiveAgeing = LiveAgeing()
    online_correction: bool = True
    """Correct predicted prefill times by completed prefills."""

    log_level: LogLevel = "info"
    per_request_log: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [c.name for c in self.slo_classes]
        if len(set(names)) != len(names):
            raise ValueError(f"class names {names} must be different")
        if [c.default for c in self.slo_classes].count(True) != 1:
            raise ValueError("exactly one class must be the default")
        for c in self.slo_classes:
            bounds = (c.min_ttft_milliseconds, c.ttft_milliseconds, c.max_ttft_milliseconds)
            if sorted(bounds) != list(bounds):
                raise ValueError(f"class {c.name}: minimum, target and maximum {bounds} must not decrease")
        if self.preemption == "chunk" and self.chunk_tokens is None:
            raise ValueError("preemption chunk needs chunkTokens")
        return self

    @property
    def default_slo_class(self) -> LiveSloClass:
        """The class of requests that name none."""
        return next(c for c in self.slo_classes if c.default)


def pod_config(
    service: FlowPrefillService,
    revision: str,
    *,
    api_keys_file: str = API_KEYS_FILE,
    profile_file: str = PROFILE_FILE,
) -> PodConfig:
    """The document that pods of the revision read at their start.

    The two paths say where the files will be in a pod; they are left out when the service has none.
    """
    spec = service.spec
    return PodConfig(
        service=service.metadata.name,
        namespace=service.metadata.namespace,
        revision=revision,
        mode=spec.mode,
        model=PodModel(
            uri=spec.model.uri,
            revision=spec.model.resolved_revision,
            served_name=spec.model.resolved_served_name,
            max_model_len=spec.model.max_model_len,
        ),
        engine=PodEngine(
            type=spec.engine.type,
            args=spec.engine.args,
            dtype=spec.engine.dtype,
            kv_cache_tokens=spec.engine.kv_cache_tokens,
            block_size=spec.engine.block_size,
            threads=spec.engine.threads,
            operator_tile_tokens=spec.engine.operator_tile_tokens,
            max_gap_milliseconds=spec.engine.max_gap_milliseconds,
        ),
        predictor=PodPredictor(
            warmup=spec.scheduling.predictor.warmup,
            profile_file=profile_file if spec.scheduling.predictor.has_profile else None,
        ),
        prefill=PodPrefill(tensor_parallel_size=spec.prefill.tensor_parallel_size),
        decode=PodDecode(
            tensor_parallel_size=spec.decode.tensor_parallel_size, max_batch_size=spec.decode.max_batch_size
        ),
        proxy=PodProxy(
            queue_limit=spec.proxy.queue_limit,
            max_body_bytes=spec.proxy.max_body_bytes,
            request_timeout_seconds=spec.proxy.request_timeout_seconds,
        ),
        kv_transfer=PodKvTransfer(
            lease_seconds=spec.kv_transfer.lease_seconds,
            timeout_seconds=spec.kv_transfer.timeout_seconds,
            max_retries=spec.kv_transfer.max_retries,
        ),
        termination=PodTermination(
            pre_stop_seconds=spec.termination.pre_stop_seconds,
            lame_duck_seconds=spec.termination.lame_duck_seconds,
            drain_seconds=spec.termination.drain_seconds,
        ),
        api_keys_file=None if spec.security.api_keys_secret_ref is None else api_keys_file,
        log_format=spec.observability.log_format,
    )


def live_config(service: FlowPrefillService) -> LiveConfig:
    """The document that running pods of the service follow."""
    spec = service.spec
    scheduling = spec.scheduling
    default = spec.default_slo_class.name
    return LiveConfig(
        generation=service.metadata.generation,
        slo_classes=tuple(
            LiveSloClass(
                name=c.name,
                ttft_milliseconds=c.ttft_milliseconds,
                tbt_milliseconds=c.tbt_milliseconds,
                objective=c.objective,
                min_ttft_milliseconds=c.resolved_min_ttft_milliseconds,
                max_ttft_milliseconds=c.resolved_max_ttft_milliseconds,
                weight=c.weight,
                default=c.name == default,
                shed_when_infeasible=c.shed_when_infeasible,
                service_tiers=c.service_tiers,
            )
            for c in spec.slo_classes
        ),
        policy=scheduling.policy,
        batch_token_budget=scheduling.batch_token_budget,
        preemption=scheduling.preemption,
        chunk_tokens=scheduling.chunk_tokens,
        max_suspended=scheduling.max_suspended,
        recompute_suspended_under_pressure=scheduling.recompute_suspended_under_pressure,
        queue_limit=scheduling.queue_limit,
        ageing=LiveAgeing(
            enabled=scheduling.ageing.enabled,
            factor=scheduling.ageing.factor,
            share_percent=scheduling.ageing.share_percent,
        ),
        online_correction=scheduling.predictor.online_correction,
        log_level=spec.observability.log_level,
        per_request_log=spec.observability.per_request_log,
    )
