"""One pod: its folders and ports, init containers, containers, readiness and end."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flowprefill_operator.node.backoff import Backoff
from flowprefill_operator.node.container import ContainerRunner
from flowprefill_operator.node.desired import Group
from flowprefill_operator.node.launch import CannotRun, Launch, Place, PodIdentity, launch
from flowprefill_operator.node.ports import all_free, free_ports
from flowprefill_operator.node.state import ContainerReport, PodReport
from flowprefill_operator.node.template import Container, Volume

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What pods of this machine share.

    `config` holds one folder for each ConfigMap of the service, `claims` one for each PersistentVolumeClaim, `files` one
    for each Secret and ConfigMap that the service only names (None: there are none). `environment` is what processes inherit; the pod's own variables win.
    """

    pods: Path
    logs: Path
    config: Path
    claims: Path
    files: Path | None
    environment: Mapping[str, str]
    address: str = "127.0.0.1"
    backoff: Backoff = field(default_factory=Backoff)
    keep_open: tuple[int, ...] = ()


class Pod:
    """A pod of one group; `run` is its whole life. Used on one event loop.

    `on_change` is called after every change that `report`, `ready` or `terminating` show.
    """

    def __init__(
        self, *, name: str, group: Group, namespace: str, machine: Machine, on_change: Callable[[], None]
    ) -> None:
        self.name = name
        self.group = group
        self.terminating = False
        self._machine = machine
        self._on_change = on_change
        self._started_at = time.time()
        self._force = asyncio.Event()
        self._stopped = asyncio.Event()
        self._problem = ""
        self._folder = machine.pods / name
        self._container_ports = tuple(port.container_port for port in group.template.spec.ports())
        self._host_ports: dict[int, int] = {}
        metadata = group.template.metadata
        self._identity = PodIdentity(
            name=name,
            namespace=namespace,
            labels=metadata.labels,
            annotations=metadata.annotations,
            address=machine.address,
        )
        spec = group.template.spec
        self._init = [self._runner(container) for container in spec.init_containers]
        self._main = [self._runner(container) for container in spec.containers]

    @property
    def ready(self) -> bool:
        """Whether every container is ready and the pod is to stay."""
        return not self.terminating and all(runner.status.ready for runner in (*self._init, *self._main))

    def host_port(self, port: int | str) -> int | None:
        """The port of this machine behind a container port, by number or name; None when nothing declares it."""
        for container in self.group.template.spec.containers:
            for declared in container.ports:
                if port in (declared.name, declared.container_port):
                    return self._host_ports.get(declared.container_port)
        return None

    async def run(self) -> None:
        """Init containers one after the other, then all containers until `stop`; removes the pod's folder."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._assign_ports()
            for runner in self._init:
                if not await runner.run_to_success():
                    return
            async with asyncio.TaskGroup() as group:
                for runner in self._main:
                    group.create_task(runner.run())
        finally:
            self.terminating = True
            self._stopped.set()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._on_change()

    async def stop(self) -> None:
        """Stop as the template says: preStop, SIGTERM, SIGKILL at the end of the grace period."""
        if not self.terminating:
            self.terminating = True
            self._on_change()
        grace_s = float(self.group.template.spec.termination_grace_period_seconds)
        async with asyncio.TaskGroup() as group:
            for runner in (*self._init, *self._main):
                group.create_task(runner.stop(grace_s=grace_s, force=self._force))
        await self._stopped.wait()

    def kill(self) -> None:
        """Cut a `stop` short: SIGKILL now."""
        self._force.set()

    def report(self) -> PodReport:
        """What `status` shows of this pod."""
        init = tuple(_report(runner) for runner in self._init)
        main = tuple(_report(runner) for runner in self._main)
        phase, message = self._phase(init, main)
        names = {
            declared.name or str(declared.container_port): self._host_ports[declared.container_port]
            for declared in self.group.template.spec.ports()
            if declared.container_port in self._host_ports
        }
        return PodReport(
            name=self.name,
            deployment=self.group.deployment,
            role=self.group.role,
            revision=self.group.revision,
            phase=phase,
            ready=self.ready,
            terminating=self.terminating,
            restarts=sum(c.restarts for c in (*init, *main)),
            started_at=self._started_at,
            message=message,
            ports=names,
            init_containers=init,
            containers=main,
        )

    def _phase(self, init: Sequence[ContainerReport], main: Sequence[ContainerReport]) -> tuple[str, str]:
        if self.terminating:
            return "Terminating", ""
        for report in init:
            if report.phase != "Completed":
                phase = report.phase if report.phase in ("CrashLoopBackOff", "CannotRun") else report.name
                return f"Init:{phase}", report.message
        for phase in ("CannotRun", "CrashLoopBackOff", "Waiting", "Starting"):
            for report in main:
                if report.phase == phase:
                    return phase, report.message
        message = next((report.message for report in main if not report.ready and report.message), "")
        return "Running", message

    def _runner(self, container: Container) -> ContainerRunner:
        def prepare() -> Launch:
            return self._prepare(container)

        def resolve(port: int | str) -> tuple[str, int]:
            number = container.port_number(port)
            return self._machine.address, self._host_ports.get(number, number)

        return ContainerRunner(
            container,
            prepare=prepare,
            resolve=resolve,
            cwd=self._folder,
            log_path=self._machine.logs / f"{self.name}.{container.name}.log",
            on_change=self._on_change,
            backoff=self._machine.backoff,
            keep_open=self._machine.keep_open,
        )

    def _assign_ports(self) -> None:
        free = free_ports(len(self._container_ports), self._machine.address)
        self._host_ports = dict(zip(self._container_ports, free, strict=True))

    def _prepare(self, container: Container) -> Launch:
        own = [self._host_ports[port.container_port] for port in container.ports]
        if not all_free(own, self._machine.address):
            # Somebody took a port between its choice and this start. A pod of several containers keeps the others'.
            for port, replacement in zip(
                container.ports, free_ports(len(own), self._machine.address), strict=True
            ):
                self._host_ports[port.container_port] = replacement
        volumes = {volume.name: volume for volume in self.group.template.spec.volumes}
        mounts: dict[str, Path] = {}
        for mount in container.volume_mounts:
            if mount.name not in volumes:
                raise CannotRun(
                    f"container {container.name!r} mounts volume {mount.name!r}, which the pod lacks"
                )
            folder = self._folder_of(volumes[mount.name])
            if folder is not None:
                mounts[mount.mount_path] = folder / mount.sub_path if mount.sub_path else folder
        return launch(
            container,
            self._identity,
            Place(mounts=mounts, ports=self._host_ports, files=self._files()),
            self._machine.environment,
        )

    def _folder_of(self, volume: Volume) -> Path | None:
        """The folder behind a volume, made when it is this pod's own; None for one that is optional and missing."""
        machine = self._machine
        if volume.config_map is not None:
            return self._given("ConfigMap", volume.config_map.name, optional=volume.config_map.optional)
        if volume.secret is not None:
            return self._given("Secret", volume.secret.secret_name, optional=volume.secret.optional)
        if volume.host_path is not None:
            return Path(volume.host_path.path)
        if volume.persistent_volume_claim is not None:
            folder = machine.claims / volume.persistent_volume_claim.claim_name
        elif volume.empty_dir is not None:
            folder = self._folder / "volumes" / volume.name
        else:
            raise CannotRun(f"volume {volume.name!r} is of a kind that the local node does not know")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _given(self, kind: str, name: str, *, optional: bool) -> Path | None:
        """The folder of a ConfigMap or Secret."""
        folder = self._files().get((kind, name))
        if folder is None and not optional:
            raise CannotRun(
                f"{kind} {name!r} is needed: put its keys as files into a folder of that name and give the folder "
                f"above it with `flowprefill up --files FOLDER`"
            )
        return folder

    def _files(self) -> dict[tuple[str, str], Path]:
        """The folders of all ConfigMaps and Secrets, for environment variables taken from one of their keys."""
        found: dict[tuple[str, str], Path] = {}
        for kinds, above in (
            (("Secret", "ConfigMap"), self._machine.files),
            (("ConfigMap",), self._machine.config),
        ):
            if above is not None and above.is_dir():
                found |= {(kind, f.name): f for f in above.iterdir() if f.is_dir() for kind in kinds}
        return found


def _report(runner: ContainerRunner) -> ContainerReport:
    status = runner.status
    return ContainerReport(
        name=status.name,
        phase=status.phase,
        ready=status.ready,
        restarts=status.restarts,
        pid=status.pid,
        message=status.message,
        log=str(runner.log_path),
    )
