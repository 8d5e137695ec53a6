"""What the local node is to run, read from planned objects. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import Field

from flowprefill_operator import labels
from flowprefill_operator.node.template import Part, PodTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Pods that are alike: one Deployment at one state of its template.

    `recreate` says that pods of an older template go before these start.
    """

    deployment: str
    template_hash: str
    role: str
    revision: str
    replicas: int
    recreate: bool
    template: PodTemplate

    @property
    def key(self) -> tuple[str, str]:
        return (self.deployment, self.template_hash)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePort:
    """A port of a Service that leads to the ready pods with all of `selector`, at their port `target`."""

    service: str
    port: int
    target: int | str
    selector: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """One service's share of this machine. `config_maps` is file name to text, by ConfigMap name."""

    namespace: str
    groups: tuple[Group, ...] = ()
    services: tuple[ServicePort, ...] = ()
    config_maps: Mapping[str, Mapping[str, str]]


class _Metadata(Part):
    name: str
    namespace: str = "default"
    annotations: dict[str, str] = Field(default_factory=dict)


class _DeploymentSpec(Part):
    replicas: int | None = None
    template: PodTemplate


class _Deployment(Part):
    metadata: _Metadata
    spec: _DeploymentSpec


class _ConfigMap(Part):
    metadata: _Metadata
    data: dict[str, str] = Field(default_factory=dict)


class _Port(Part):
    name: str = ""
    port: int
    target_port: int | str | None = None


class _ServiceSpec(Part):
    cluster_ip: str | None = Field(default=None, alias="clusterIP")
    selector: dict[str, str] = Field(default_factory=dict)
    ports: tuple[_Port, ...] = ()


class _Service(Part):
    metadata: _Metadata
    spec: _ServiceSpec


class _Target(Part):
    name: str


class _AutoscalerSpec(Part):
    min_replicas: int = 1
    scale_target_ref: _Target


class _Autoscaler(Part):
    spec: _AutoscalerSpec


class _ScaledObjectSpec(Part):
    min_replica_count: int = 0
    scale_target_ref: _Target


class _ScaledObject(Part):
    spec: _ScaledObjectSpec


def desired(objects: Iterable[Mapping[str, object]]) -> Desired:
    """The Deployments, ConfigMaps and Services among `objects`; other kinds mean nothing to one machine.

    A Deployment without replicas (an autoscaler owns them) runs its autoscaler's minimum. Headless Services are
    discovery, which here is the endpoints file.
    """
    deployments: list[_Deployment] = []
    config_maps: dict[str, Mapping[str, str]] = {}
    services: list[ServicePort] = []
    minimum: dict[str, int] = {}
    for item in objects:
        match item.get("kind"):
            case "Deployment":
                deployments.append(_Deployment.model_validate(item))
            case "ConfigMap":
                config_map = _ConfigMap.model_validate(item)
                config_maps[config_map.metadata.name] = config_map.data
            case "Service":
                services += _service_ports(_Service.model_validate(item))
            case "HorizontalPodAutoscaler":
                scaler = _Autoscaler.model_validate(item)
                minimum[scaler.spec.scale_target_ref.name] = scaler.spec.min_replicas
            case "ScaledObject":
                scaled = _ScaledObject.model_validate(item)
                minimum[scaled.spec.scale_target_ref.name] = scaled.spec.min_replica_count
    namespace = deployments[0].metadata.namespace if deployments else "default"
    return Desired(
        namespace=namespace,
        groups=tuple(_group(d, minimum.get(d.metadata.name, 1)) for d in deployments),
        services=tuple(services),
        config_maps=config_maps,
    )


def _service_ports(service: _Service) -> list[ServicePort]:
    if service.spec.cluster_ip == "None" or not service.spec.selector:
        return []
    return [
        ServicePort(
            service=service.metadata.name,
            port=port.port,
            target=port.port if port.target_port is None else port.target_port,
            selector=service.spec.selector,
        )
        for port in service.spec.ports
    ]


def _group(deployment: _Deployment, minimum: int) -> Group:
    template = deployment.spec.template
    text = json.dumps(template.model_dump(mode="json"), sort_keys=True)
    metadata = template.metadata
    return Group(
        deployment=deployment.metadata.name,
        template_hash=hashlib.sha256(text.encode()).hexdigest()[:10],
        role=metadata.labels.get(labels.ROLE, ""),
        revision=metadata.labels.get(labels.REVISION, ""),
        replicas=minimum if deployment.spec.replicas is None else deployment.spec.replicas,
        recreate=deployment.metadata.annotations.get(labels.ROLLOUT) == "Recreate",
        template=template,
    )
