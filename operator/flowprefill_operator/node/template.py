"""The part of the pod API that the local node honours, read from planned objects.

Everything else in a template (resources, security contexts, affinity, images) has no meaning for a process
of this machine and is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class Part(BaseModel):
    """Base of the pieces of a template: camelCase, immutable, unknown fields passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


class HttpGet(Part):
    path: str = "/"
    port: int | str
    scheme: str = "HTTP"


class TcpSocket(Part):
    port: int | str


class Probe(Part):
    """A probe as Kubernetes defines it, with its defaults; times in seconds."""

    http_get: HttpGet | None = None
    tcp_socket: TcpSocket | None = None
    initial_delay_seconds: int = 0
    period_seconds: int = 10
    timeout_seconds: int = 1
    failure_threshold: int = 3
    success_threshold: int = 1


class Sleep(Part):
    seconds: int


class LifecycleHandler(Part):
    sleep: Sleep | None = None


class Lifecycle(Part):
    pre_stop: LifecycleHandler | None = None


class FieldRef(Part):
    field_path: str


class KeyRef(Part):
    name: str
    key: str
    optional: bool = False


class EnvSource(Part):
    field_ref: FieldRef | None = None
    config_map_key_ref: KeyRef | None = None
    secret_key_ref: KeyRef | None = None


class EnvVar(Part):
    name: str
    value: str = ""
    value_from: EnvSource | None = None


class ContainerPort(Part):
    name: str = ""
    container_port: int


class VolumeMount(Part):
    name: str
    mount_path: str
    sub_path: str = ""


class Container(Part):
    name: str
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: tuple[EnvVar, ...] = ()
    ports: tuple[ContainerPort, ...] = ()
    volume_mounts: tuple[VolumeMount, ...] = ()
    startup_probe: Probe | None = None
    readiness_probe: Probe | None = None
    liveness_probe: Probe | None = None
    lifecycle: Lifecycle | None = None

    @property
    def pre_stop_s(self) -> int:
        """Seconds between the decision to stop and SIGTERM."""
        handler = self.lifecycle.pre_stop if self.lifecycle else None
        return handler.sleep.seconds if handler and handler.sleep else 0

    def port_number(self, port: int | str) -> int:
        """The container port a probe or Service means by number or name.

        Raises KeyError when no port has that name.
        """
        if isinstance(port, int):
            return port
        for declared in self.ports:
            if declared.name == port:
                return declared.container_port
        raise KeyError(port)


class EmptyDir(Part):
    medium: str = ""


class ConfigMapSource(Part):
    name: str
    optional: bool = False


class SecretSource(Part):
    secret_name: str
    optional: bool = False


class ClaimSource(Part):
    claim_name: str


class HostPath(Part):
    path: str


class Volume(Part):
    name: str
    empty_dir: EmptyDir | None = None
    config_map: ConfigMapSource | None = None
    secret: SecretSource | None = None
    persistent_volume_claim: ClaimSource | None = None
    host_path: HostPath | None = None


class PodSpec(Part):
    containers: tuple[Container, ...]
    init_containers: tuple[Container, ...] = ()
    volumes: tuple[Volume, ...] = ()
    termination_grace_period_seconds: int = 30

    def ports(self) -> Iterator[ContainerPort]:
        """All ports the pod's containers declare."""
        for container in self.containers:
            yield from container.ports


class PodMetadata(Part):
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class PodTemplate(Part):
    metadata: PodMetadata = PodMetadata()
    spec: PodSpec
