"""The local node's main loop: one service, its pods, its files and its port on this machine.

Every trigger (a pod changed, `service.yaml` changed, a signal) only sets an event; one idempotent pass then
1. takes over a changed service, keeping the last good one when the new one is refused,
2. decides which pods start and stop (rollout.py),
3. writes endpoints.json and status.json.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial

from flowprefill_crd import FlowPrefillService, InvalidDocument, load_services, restart_hash
from flowprefill_operator import labels
from flowprefill_operator.node.desired import Desired, Group, ServicePort, desired
from flowprefill_operator.node.forward import Forwarder
from flowprefill_operator.node.pod import Machine, Pod
from flowprefill_operator.node.rollout import PodView, decide
from flowprefill_operator.node.state import NodeStatus, Options, StateDir, write_folder, write_json

_log = logging.getLogger(__name__)

Plan = Callable[[FlowPrefillService], Sequence[Mapping[str, object]]]
"""From a service to the objects that make it; pure."""

PORT_TRIES = 100
"""How many ports above the wanted one are tried when no port was asked for."""
FAILED_POD_PAUSE_S = 1.0


class CannotStart(Exception):
    """The node cannot run the service on this machine; the message says why."""


class Supervisor:
    """Runs one service until `stop`. Made and used on one event loop.

    `plan` turns the service into objects; `machine` says where pods' files and processes live; `on_status` gets every
    status that is written.
    """

    def __init__(
        self,
        state: StateDir,
        *,
        plan: Plan,
        machine: Machine,
        options: Options,
        on_status: Callable[[NodeStatus], None] = lambda _: None,
    ) -> None:
        self._state = state
        self._plan = plan
        self._machine = machine
        self._options = options
        self._on_status = on_status
        self._pods: dict[str, Pod] = {}  # in order of age
        self._tasks: set[asyncio.Task[None]] = set()
        self._forwarders: dict[tuple[str, int | str], tuple[int, Forwarder]] = {}
        self._changed = asyncio.Event()
        self._reload = True
        self._stops = 0
        self._desired = Desired(namespace=state.namespace, config_maps={})
        self._service: FlowPrefillService | None = None
        self._loaded = ""
        self._endpoints: object = None
        self._published: NodeStatus | None = None
        self._status = NodeStatus(
            service=state.name, namespace=state.namespace, pid=os.getpid(), started_at=time.time()
        )

    def stop(self) -> None:
        """Stop gracefully; the second call kills what is left. Safe as a signal handler of the loop."""
        self._stops += 1
        if self._stops > 1:
            for pod in self._pods.values():
                pod.kill()
        self._changed.set()

    def _signalled(self, number: signal.Signals) -> None:
        _log.info(
            "stop asked for",
            extra={"service": self._state.name, "signal": number.name, "times": self._stops + 1},
        )
        self.stop()

    def reload(self) -> None:
        """Read `service.yaml` again."""
        self._reload = True
        self._changed.set()

    async def run(self) -> None:
        """Run until stopped; nothing of the service is left when this returns or raises.

        Raises InvalidDocument or CannotStart when the first service cannot be run at all.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(signal.SIGUSR1, self.reload)
        try:
            self._state.write_status(self._status)
            await self._load(first=True)
            self._changed.set()
            while not (self._stops and not self._pods):
                await self._changed.wait()
                self._changed.clear()
                if self._reload and not self._stops:
                    await self._load(first=False)
                self._step()
                self._publish()
        finally:
            await self._end()

    async def _load(self, *, first: bool) -> None:
        self._reload = False
        body = self._state.service.read_bytes()
        digest = hashlib.sha256(body).hexdigest()[:16]
        if digest == self._loaded:
            return
        try:
            (service,) = load_services(self._state.service)
            if service.spec.paused:
                self._pause(digest)
                return
            service = self._numbered(service)
            wanted = desired(self._plan(service))
            self._write_config(wanted)
            await self._listen(wanted)
        except (InvalidDocument, CannotStart, ValueError) as error:
            if first:
                raise
            _log.warning(
                "change refused, the last service stays",
                extra={"service": self._state.name, "reason": str(error)},
            )
            self._status = self._status.model_copy(update={"error": str(error), "error_digest": digest})
            return
        self._loaded = digest
        self._service = service
        self._desired = wanted
        self._status = self._status.model_copy(
            update={
                "applied": digest,
                "generation": service.metadata.generation,
                "revision": restart_hash(service),
                "paused": False,
                "error": "",
                "error_digest": "",
            }
        )
        _log.info(
            "service taken over", extra={"service": self._state.name, "revision": self._status.revision}
        )

    def _pause(self, digest: str) -> None:
        """Leave pods and configuration as they are. Raises CannotStart where there are none yet."""
        if self._service is None:
            raise CannotStart(
                "spec.paused: true starts nothing; use false for a service that does not run yet"
            )
        self._loaded = digest
        self._status = self._status.model_copy(
            update={"applied": digest, "paused": True, "error": "", "error_digest": ""}
        )
        _log.info("service paused", extra={"service": self._state.name})

    def _numbered(self, service: FlowPrefillService) -> FlowPrefillService:
        """The service with the generation that an API server would have given it: one more for each changed spec."""
        if self._service is None:
            return service
        same = self._service.spec == service.spec
        generation = self._service.metadata.generation + (0 if same else 1)
        return service.model_copy(
            update={"metadata": service.metadata.model_copy(update={"generation": generation})}
        )

    def _write_config(self, wanted: Desired) -> None:
        for name, files in wanted.config_maps.items():
            write_folder(self._machine.config / name, files)

    async def _listen(self, wanted: Desired) -> None:
        """Have each Service's port open before its pods start, so that a taken port is known at once."""
        for service in wanted.services:
            key = (service.service, service.target)
            port = service.port if self._options.port is None else self._options.port
            if key in self._forwarders and self._forwarders[key][0] == port:
                continue
            forwarder = Forwarder(partial(self._backends, service))
            listening = await self._open(forwarder, port)
            if key in self._forwarders:
                await self._forwarders[key][1].close()
            self._forwarders[key] = (port, forwarder)
            self._status = self._status.model_copy(update={"url": f"http://{self._options.host}:{listening}"})

    async def _open(self, forwarder: Forwarder, port: int) -> int:
        tries = (
            range(port, port + 1)
            if self._options.port is not None
            else range(port, min(port + PORT_TRIES, 65_536))
        )
        for candidate in tries:
            try:
                return await forwarder.listen(self._options.host, candidate)
            except OSError as error:
                problem = error
        raise CannotStart(
            f"port {port} of {self._options.host} cannot be opened ({problem.strerror}); "
            f"choose another with --port, or --port 0 for any"
        )

    def _backends(self, service: ServicePort) -> list[tuple[str, int]]:
        found = []
        for pod in self._pods.values():
            if pod.ready and service.selector.items() <= pod.group.template.metadata.labels.items():
                port = pod.host_port(service.target)
                if port is not None:
                    found.append((self._machine.address, port))
        return found

    def _step(self) -> None:
        if self._stops:
            for pod in self._pods.values():
                self._stop_pod(pod)
            return
        groups = {group.key: group for group in self._desired.groups}
        decision = decide(self._desired.groups, [_view(pod) for pod in self._pods.values()])
        for key in decision.start:
            self._start_pod(groups[key])
        for name in decision.stop:
            self._stop_pod(self._pods[name])
        if all(pod.group.key in groups for pod in self._pods.values()):
            self._drop_old_config()

    def _start_pod(self, group: Group) -> None:
        number = 0
        while (name := f"{group.deployment}-{number}") in self._pods:
            number += 1
        pod = Pod(
            name=name,
            group=group,
            namespace=self._desired.namespace,
            machine=self._machine,
            on_change=self._changed.set,
        )
        self._pods[name] = pod
        _log.info("pod starts", extra={"pod": name, "revision": group.revision})
        self._spawn(self._run_pod(pod))

    def _stop_pod(self, pod: Pod) -> None:
        if not pod.terminating:
            _log.info("pod stops", extra={"pod": pod.name})
            pod.terminating = True
            self._spawn(pod.stop())

    async def _run_pod(self, pod: Pod) -> None:
        try:
            await pod.run()
        except Exception:
            # A pod must not take the others down; the pause keeps a lasting fault from a busy loop.
            _log.exception("pod failed", extra={"pod": pod.name})
            await asyncio.sleep(FAILED_POD_PAUSE_S)
        finally:
            del self._pods[pod.name]
            self._changed.set()

    def _drop_old_config(self) -> None:
        for folder in self._machine.config.iterdir():
            if folder.is_dir() and folder.name not in self._desired.config_maps:
                shutil.rmtree(folder, ignore_errors=True)

    def _publish(self) -> None:
        endpoints = {"endpoints": [entry for pod in self._pods.values() if (entry := self._endpoint(pod))]}
        if endpoints != self._endpoints:
            write_json(self._state.endpoints, endpoints)
            self._endpoints = endpoints
        rollout = self._unfinished()
        status = self._status.model_copy(
            update={
                "pods": tuple(pod.report() for pod in self._pods.values()),
                "rollout": rollout,
                "ready": not rollout and not self._stops,
                "stopping": self._stops > 0,
            }
        )
        if status != self._published:
            self._status = self._published = status
            self._state.write_status(status)
            self._on_status(status)

    def _endpoint(self, pod: Pod) -> dict[str, object] | None:
        """The pod as discovery reports it; None for a proxy and for a pod without the two ports."""
        address, admin = pod.host_port(labels.API_PORT), pod.host_port(labels.ADMIN_PORT)
        if pod.group.role == "proxy" or address is None or admin is None:
            return None
        return {
            "name": pod.name,
            "role": pod.group.role,
            "revision": pod.group.revision,
            "address": f"{self._machine.address}:{address}",
            "admin": f"{self._machine.address}:{admin}",
            "ready": pod.ready,
            "terminating": pod.terminating,
        }

    def _unfinished(self) -> str:
        """What is still to happen until the wanted pods and no others run; empty when nothing is."""
        waiting = []
        for group in self._desired.groups:
            ready = sum(pod.ready for pod in self._pods.values() if pod.group.key == group.key)
            if ready < group.replicas:
                waiting.append(f"{group.deployment} {ready}/{group.replicas} ready")
        wanted = {group.key for group in self._desired.groups}
        old = sum(pod.group.key not in wanted for pod in self._pods.values())
        if old:
            waiting.append(f"{old} pod(s) of an older revision still run")
        return "; ".join(waiting)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self) -> None:
        """Leave nothing behind, whatever ended the loop."""
        for pod in self._pods.values():
            if self._stops == 0:  # not a requested stop: no time for grace
                pod.kill()
            self._stop_pod(pod)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _, forwarder in self._forwarders.values():
            await forwarder.close()
        self._state.write_status(
            self._status.model_copy(
                update={"pods": (), "url": "", "rollout": "", "ready": False, "stopping": False}
            )
        )
        _log.info("service stopped", extra={"service": self._state.name})


def _view(pod: Pod) -> PodView:
    return PodView(
        name=pod.name, group=pod.group.key, role=pod.group.role, ready=pod.ready, terminating=pod.terminating
    )
