"""The scheduler's thread and everything it owns, put together for a role that prefills."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowprefill.clock import MonotonicClock
from flowprefill.execution.driver import SchedulerDriver
from flowprefill.execution.listener import DriverListener
from flowprefill.execution.pool import ExecutionPool, Items
from flowprefill.scheduling.actions import Action, Task
from flowprefill.scheduling.events import Event
from flowprefill.scheduling.kv import KVCachePool
from flowprefill.scheduling.predictor import Predictor
from flowprefill.scheduling.scheduler import Scheduler
from flowprefill.server.history import History
from flowprefill.server.prefill import PrefillService
from flowprefill.server.role import Pod
from flowprefill.server.settings import scheduler_settings
from flowprefill_crd import LiveConfig


class ScheduledPrefill:
    """A prefill service with its scheduler. `payload` and `listener` let a role put itself in between."""

    def __init__(
        self,
        pod: Pod,
        predictor: Predictor,
        *,
        num_kv_blocks: int,
        payload: Callable[[Task], Items] | None = None,
        listener: Callable[[PrefillService], DriverListener] = lambda service: service,
    ) -> None:
        """`num_kv_blocks` of the engine's blocks, from the first on, are the scheduler's."""
        self._pod = pod
        self.clock = MonotonicClock()
        kv = KVCachePool(num_kv_blocks, pod.engine.spec.block_size)
        self.service = PrefillService(self.clock, kv, pod.metrics)
        self.history = History()
        self.driver = SchedulerDriver(
            Scheduler(scheduler_settings(pod.live.current), kv, predictor),
            ExecutionPool(pod.engine, self.clock),
            self.clock,
            self.service.payload if payload is None else payload,
            listener(self.service),
            record=self._record,
        )
        self.service.connect(self.driver, on_view=pod.states.changed, on_crash=pod.lifecycle.fail)

    def reconfigure(self, live: LiveConfig) -> None:
        """Take over new live settings."""
        self.driver.reconfigure(scheduler_settings(live))

    def before_scrape(self) -> None:
        """Bring the scheduler's gauges up to date."""
        snapshot = self.driver.snapshot()
        metrics = self._pod.metrics.scheduler
        metrics.kv(num_blocks=snapshot.kv_blocks, num_free=snapshot.kv_blocks_free)
        metrics.count_infeasible(self.clock.now_s(), snapshot.prediction)

    def _record(self, event: Event, actions: Sequence[Action], now_s: float) -> None:
        self.history.record(event, actions, now_s)
