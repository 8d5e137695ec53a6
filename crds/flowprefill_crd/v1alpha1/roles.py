"""The three roles of pods: prefill, decode and proxy."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue, StringConstraints, WithJsonSchema

from flowprefill_crd.base import (
    ApiObject,
    DnsLabel,
    LabelKey,
    LabelValue,
    Quantity,
)
from flowprefill_crd.rules import Rule, Rules, Unique
from flowprefill_crd.v1alpha1.route import HttpRoute

GPU = "nvidia.com/gpu"

ResourceName = Annotated[str, StringConstraints(min_length=1, max_length=253)]
Quantities = Annotated[dict[ResourceName, Quantity], Field(max_length=16)]
PodLabels = Annotated[dict[LabelKey, LabelValue], Field(max_length=64)]
PodAnnotations = Annotated[
    dict[LabelKey, Annotated[str, StringConstraints(max_length=4096)]], Field(max_length=64)
]


class ResourceClaim(ApiObject):
    """A claim of dynamic resource allocation that the container uses."""

    name: DnsLabel
    """Name of an entry of resourceClaims in the pod template. Restarts pods."""

    request: Annotated[str, StringConstraints(min_length=1, max_length=253)] | None = None
    """One request within the claim; all of them when absent. Restarts pods."""


class Resources(ApiObject):
    """What one container asks of its node, as in a Pod."""

    requests: Quantities = Field(default_factory=dict)
    """Amounts that the scheduler sets aside, by resource name. Restarts pods."""

    limits: Quantities = Field(default_factory=dict)
    """Most that the container may use, by resource name. GPUs stand here as nvidia.com/gpu. Restarts pods."""

    claims: Annotated[tuple[ResourceClaim, ...], Field(max_length=8), Unique("name")] = ()
    """Claims of dynamic resource allocation. Restarts pods."""


class PodMetadata(ApiObject):
    """Labels and annotations for the pods of one role."""

    labels: PodLabels = Field(default_factory=dict)
    """Further labels; those under flowprefill.io/ and app.kubernetes.io/ are the operator's. Restarts pods."""

    annotations: PodAnnotations = Field(default_factory=dict)
    """Further annotations. Restarts pods."""


class PodTemplate(ApiObject):
    """Changes to the pods that the operator plans, merged into them like a strategic merge patch."""

    metadata: PodMetadata = PodMetadata()
    """Labels and annotations. Restarts pods."""

    spec: Annotated[
        dict[str, JsonValue],
        WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
    ] = Field(default_factory=dict)
    """Any field of a PodSpec. Containers, volumes and other named items are merged by name: the
    role's own container is called prefill, decode or proxy, and prefill too in mode Colocated. A container of
    another name runs beside it and needs an image. Restarts pods."""


_URL = r"^https?://[!-~]+$"

URL_RULE = Rule(
    message="use an http:// or https:// URL, for example http://prometheus.monitoring:9090",
    cel=f"self.matches(r'{_URL}')",
    holds=lambda url: re.fullmatch(_URL.removeprefix("^").removesuffix("$"), url) is not None,
    seen=lambda url: str(url),
)


class Autoscaling(ApiObject):
    """How the number of a role's pods follows the load."""

    rules: ClassVar = (
        Rule(
            message="minReplicas is above maxReplicas; use at most maxReplicas",
            cel="self.minReplicas <= self.maxReplicas",
            holds=lambda a: a.min_replicas <= a.max_replicas,
            field="minReplicas",
            seen=lambda a: f"{a.min_replicas} above {a.max_replicas}",
        ),
        Rule(
            message="provider Keda needs prometheusAddress, for example http://prometheus.monitoring:9090",
            cel="self.provider != 'Keda' || has(self.prometheusAddress)",
            holds=lambda a: a.provider != "Keda" or a.prometheus_address is not None,
            field="prometheusAddress",
        ),
    )

    min_replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Fewest pods. Applied live."""

    max_replicas: Annotated[int, Field(ge=1, le=1024)]
    """Most pods. Applied live."""

    provider: Literal["HorizontalPodAutoscaler", "Keda"] = "HorizontalPodAutoscaler"
    """Which object scales the role: a HorizontalPodAutoscaler on CPU use, or a KEDA ScaledObject on the
    role's own load as Prometheus sees it. Applied live."""

    target_utilization_percent: Annotated[int, Field(ge=1, le=100)] = 70
    """Use of the present pods, in percent, at which more are added: of the requested CPU with
    HorizontalPodAutoscaler, of the role's own capacity with Keda. Applied live."""

    prometheus_address: Annotated[str, StringConstraints(max_length=512), Rules(URL_RULE)] | None = None
    """URL of the Prometheus that KEDA asks. Applied live."""

    scale_down_stabilization_seconds: Annotated[int, Field(ge=0, le=3600)] = 300
    """Seconds that the load must stay low before pods are removed. Applied live."""


class Role(ApiObject):
    """What the three roles have in common."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="set replicas or autoscaling, not both",
            cel="!(has(self.replicas) && has(self.autoscaling))",
            holds=lambda r: r.replicas is None or r.autoscaling is None,
            field="replicas",
        ),
    )

    replicas: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Number of pods; 1 when neither this nor autoscaling is set. A revision that is being replaced keeps
    the number that it has. Applied live."""

    autoscaling: Autoscaling | None = None
    """Let the number of pods follow the load, instead of replicas. Applied live."""

    resources: Resources = Resources()
    """What the role's container asks of its node. Restarts pods."""

    pod_template: PodTemplate = PodTemplate()
    """Changes to the pods of this role. Restarts pods."""

    @property
    def initial_replicas(self) -> int:
        """Pods to start with: `replicas`, or the fewest of `autoscaling`, or 1."""
        if self.autoscaling is not None:
            return self.autoscaling.min_replicas
        return 1 if self.replicas is None else self.replicas

    @property
    def most_replicas(self) -> int:
        """The most pods that the role may have."""
        return self.initial_replicas if self.autoscaling is None else self.autoscaling.max_replicas


def _gpus_divide(role: WorkerRole) -> bool:
    gpus = role.resources.limits.get(GPU)
    return gpus is None or (gpus.isascii() and gpus.isdigit() and int(gpus) % role.tensor_parallel_size == 0)


_LIMIT = f"self.resources.limits['{GPU}']"


class WorkerRole(Role):
    """What the prefill and decode roles have in common."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *Role.rules,
        Rule(
            message=f"the limit of {GPU} must be a multiple of tensorParallelSize",
            cel=f"!has(self.resources) || !has(self.resources.limits) || !('{GPU}' in self.resources.limits) || "
            f"(type({_LIMIT}) == int ? int({_LIMIT}) % self.tensorParallelSize == 0 : "
            f"string({_LIMIT}).matches('^[0-9]+$') && int(string({_LIMIT})) % self.tensorParallelSize == 0)",
            holds=_gpus_divide,
            field="tensorParallelSize",
            seen=lambda r: f"{r.resources.limits[GPU]} for tensorParallelSize {r.tensor_parallel_size}",
        ),
    )

    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Accelerators that one pod splits the model over. With engine vllm a pod asks for as many nvidia.com/gpu, unless its
    resources name GPUs of any kind (0 for none). Restarts pods."""

    nodes: Annotated[int, Field(ge=1, le=64)] = 1
    """Nodes that the role's pods span together, as one group. Only 1 is served so far; more are refused with the
    condition MultiNodeUnsupported. Restarts pods."""

    startup_timeout_seconds: Annotated[int, Field(ge=10, le=86_400)] = 1800
    """Seconds a pod may take from its start until it is ready; it is restarted after that. Restarts pods."""


class Prefill(WorkerRole):
    """The pods that compute prompts. In Colocated mode they decode too."""


class Decode(WorkerRole):
    """The pods that generate answers. In Colocated mode only maxBatchSize applies."""

    max_batch_size: Annotated[int, Field(ge=1, le=4096)] = 32
    """Most sequences that one pod decodes at the same time. Restarts pods."""


class Proxy(Role):
    """The pods that take requests from clients and place them on prefill and decode pods."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *Role.rules,
        Rule(
            message="portApi and portAdmin are the same; use two different ports",
            cel="self.portApi != self.portAdmin",
            holds=lambda p: p.port_api != p.port_admin,
            field="portAdmin",
            seen=lambda p: str(p.port_admin),
        ),
    )

    startup_timeout_seconds: Annotated[int, Field(ge=10, le=86_400)] = 60
    """Seconds a pod may take from its start until it is ready; it is restarted after that. Restarts pods."""

    queue_limit: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Most requests that wait in one proxy; further ones are rejected (429). Restarts pods."""

    max_body_bytes: Annotated[int, Field(ge=1024, le=1_073_741_824)] = 16_777_216
    """Largest request body in bytes; larger ones are rejected (413). Restarts pods."""

    request_timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    """Seconds from a complete request to the end of its answer; then it fails (504). Restarts pods."""

    port_api: Annotated[int, Field(ge=1024, le=65_535)] = 8000
    """Port of the OpenAI API, in the pods and in the Service. Restarts pods."""

    port_admin: Annotated[int, Field(ge=1024, le=65_535)] = 9000
    """Port of health, metrics and administration in the pods. Restarts pods."""

    http_route: HttpRoute | None = None
    """Create an HTTPRoute to the proxies, where the cluster has the Gateway API; none when absent. Applied live."""
