"""What surrounds a pod whatever engine it runs: phases, the admin port, metrics, the state stream, the live document."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Literal, Protocol

from prometheus_client import CollectorRegistry

from flowprefill.hosting.admin import InUse, admin_app
from flowprefill.hosting.documents import LiveDocument
from flowprefill.hosting.lifecycle import Lifecycle, stopped_by_signals
from flowprefill.hosting.listening import HttpServer
from flowprefill.logs import set_level
from flowprefill.metrics.engine import engine_metrics
from flowprefill.scheduling.profile import Profile
from flowprefill.server.admin import admin_routes
from flowprefill.server.state import StateHub
from flowprefill.server.states import starting_state
from flowprefill.wire import PodState
from flowprefill_crd import LiveConfig, PodConfig

RoleName = Literal["prefill", "decode", "colocated"]

ADMIN_DRAIN_S = 1.0


class Inside(Protocol):
    """What a pod has once its model is loaded."""

    def reconfigure(self, live: LiveConfig) -> None:
        """A new live document is in use."""
        ...

    def before_scrape(self) -> None:
        """Bring gauges up to date."""
        ...

    def history(self) -> dict[str, object]:
        """The last tasks and preemptions (`server.history`)."""
        ...


class PodFrame:
    """The part of a pod that is there before its model and after it. `insides` has none or one."""

    def __init__(self, role: RoleName, config: PodConfig, live: LiveDocument[LiveConfig]) -> None:
        self.role: RoleName = role
        self.config = config
        self.live = live
        self.insides: list[Inside] = []
        self.metrics = engine_metrics(
            CollectorRegistry(),
            service=config.service,
            model_name=config.model.served_name,
            role=role,
            classes=[c.name for c in live.current.slo_classes],
        )
        self.metrics.pod.live_generation(live.current.generation)
        self.states = StateHub(self._starting)
        self.lifecycle = Lifecycle("pod")
        self.lifecycle.subscribe(self._phase_changed)
        live.subscribe(changed=self._live_changed, refused=self.metrics.pod.live_document_refused)

    @contextlib.asynccontextmanager
    async def open(self, at: socket.socket, *, handle_signals: bool) -> AsyncIterator[None]:
        """Inside, the admin port `at` answers and the live document is followed. Signals begin the stop."""
        admin = HttpServer(
            admin_app(
                admin_routes(
                    states=self.states, history=lambda: self.insides[0].history() if self.insides else {}
                ),
                in_use=InUse(
                    role=self.role,
                    revision=self.config.revision,
                    generation=lambda: self.live.current.generation,
                ),
                lifecycle=self.lifecycle,
                registry=self.metrics.registry,
                before_scrape=self._before_scrape,
            ),
            at=at,
            drain_s=ADMIN_DRAIN_S,
        )
        with stopped_by_signals(self.lifecycle) if handle_signals else contextlib.nullcontext():
            await admin.start()
            watching = asyncio.ensure_future(self.live.watch())
            try:
                yield
            finally:
                watching.cancel()
                self.lifecycle.enter("stopped")
                self.states.close()
                await admin.stop()

    def forget(self) -> None:
        """The model is gone again."""
        self.insides.clear()
        self.states.build_by(self._starting)

    def describe_predictor(self, profile: Profile) -> None:
        """Say in the metrics where the predictor's profile comes from."""
        taken = profile.provenance
        self.metrics.scheduler.predictor(
            version=version("flowprefill"),
            model=taken.model,
            tp=taken.tensor_parallel_size,
            gpu=taken.device,
            created=taken.taken_on.isoformat(),
        )

    def facts(self) -> dict[str, object]:
        """What the log says about a pod that begins to serve."""
        live = self.live.current
        return {
            "role": self.role,
            "revision": self.config.revision,
            "generation": live.generation,
            "policy": live.policy,
            "preemption": live.preemption,
            "batch_token_budget": live.batch_token_budget,
            "chunk_tokens": live.chunk_tokens,
            "slo_classes": [c.name for c in live.slo_classes],
        }

    def _starting(self, sequence: int) -> PodState:
        return starting_state(role=self.role, revision=self.config.revision, sequence=sequence)

    def _before_scrape(self) -> None:
        self.metrics.pod.ready(self.lifecycle.ready)
        for inside in self.insides:
            inside.before_scrape()

    def _phase_changed(self) -> None:
        self.metrics.pod.ready(self.lifecycle.ready)
        self.states.changed()

    def _live_changed(self, live: LiveConfig) -> None:
        set_level(live.log_level)
        self.metrics.pod.live_generation(live.generation)
        self.metrics.scheduler.set_classes([c.name for c in live.slo_classes])
        for inside in self.insides:
            inside.reconfigure(live)
        self.states.changed()


def advertised(host: str) -> str:
    """The address at which other pods reach this one: Kubernetes's POD_IP, else the address it listens on."""
    if pod_ip := os.environ.get("POD_IP"):
        return pod_ip
    if host in ("0.0.0.0", "::", ""):
        return socket.gethostbyname(socket.gethostname())
    return host
