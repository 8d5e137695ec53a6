"""What the engine core tells, as metrics, state stream and history: those of every other pod."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from flowprefill.clock import MonotonicClock
from flowprefill.engines.protocol import EngineSpec
from flowprefill.hosting.documents import LiveDocument
from flowprefill.hosting.lifecycle import Lifecycle
from flowprefill.metrics.engine import EngineMetrics
from flowprefill.scheduling.actions import Finish, Submit
from flowprefill.scheduling.events import Arrival
from flowprefill.server.frame import PodFrame
from flowprefill.server.history import History
from flowprefill.server.prefill import SchedulerView
from flowprefill.server.settings import scheduler_settings
from flowprefill.server.slo import slo_of
from flowprefill.server.states import prefill_state
from flowprefill.server.vllm.channel import Decided, FromCore, Reconfigure, Seen, Started
from flowprefill.server.vllm.probing import EngineLoad
from flowprefill.wire import PodState
from flowprefill_crd import LiveConfig, PodConfig

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Prompt:
    num_tokens: int
    num_cached: int | None = None


class Observer:
    """Hears the engine core and answers the admin port. Event-loop thread only."""

    def __init__(self, frame: PodFrame, tell: Callable[[Reconfigure], None] = lambda message: None) -> None:
        """`tell` sends to the core."""
        self._frame = frame
        self._tell = tell
        self._clock = MonotonicClock()
        self._history = History()
        self._view: SchedulerView | None = None
        self._prompts: dict[str, _Prompt] = {}
        self._load: EngineLoad | None = None
        self.spec: EngineSpec | None = None

    # Of the pod (`states.Stated`).

    @property
    def role(self) -> str:
        return self._frame.role

    @property
    def config(self) -> PodConfig:
        return self._frame.config

    @property
    def live(self) -> LiveDocument[LiveConfig]:
        return self._frame.live

    @property
    def lifecycle(self) -> Lifecycle:
        return self._frame.lifecycle

    @property
    def _metrics(self) -> EngineMetrics:
        return self._frame.metrics

    @property
    def started(self) -> bool:
        """Whether the core has said that its engine is loaded."""
        return self.spec is not None

    @property
    def idle(self) -> bool:
        """Whether the core's last word was that it has nothing to do and holds nobody's KV."""
        snapshot = self._view.snapshot if self._view is not None else None
        return snapshot is not None and (
            snapshot.running is None
            and not snapshot.suspended
            and not snapshot.waiting
            and snapshot.kv_blocks_free == snapshot.kv_blocks
        )

    @property
    def holds_kv(self) -> bool:
        """Whether blocks are in use by its last word: of requests, or of prompts whose KV waits to be pulled."""
        return self._view is not None and self._view.snapshot.kv_blocks_free < self._view.snapshot.kv_blocks

    # From the core.

    def hear(self, message: FromCore) -> None:
        """Take one message in."""
        match message:
            case Started():
                self._started(message)
            case Decided():
                self._decided(message)
            case Seen(snapshot=snapshot, cached_prefixes=prefixes):
                self._view = SchedulerView(snapshot=snapshot, cached_prefixes=prefixes)
                self._frame.states.changed()

    def connected(self) -> None:
        """A core has come. What an earlier one had waiting is gone."""
        self._forget()

    def lost(self, num_lost: int) -> None:
        """The core had to drop decisions: which requests wait is not known any more."""
        log.warning("the engine core decides faster than is heard", extra={"lost": num_lost})
        self._forget()

    def _forget(self) -> None:
        self._prompts.clear()
        self._metrics.scheduler.forget_waiting()

    def _started(self, started: Started) -> None:
        self.spec = started.spec
        spec = started.spec
        if started.profile is not None:
            self._frame.describe_predictor(started.profile)
        log.info(
            "model loaded",
            extra={
                "model": spec.model,
                "model_revision": spec.revision,
                "engine": spec.engine,
                "device": spec.device,
                "dtype": spec.dtype,
                "max_model_len": spec.max_model_len,
                "kv_blocks": spec.num_kv_blocks,
                "block_size": spec.block_size,
            },
        )
        self._frame.states.changed()

    def _decided(self, decided: Decided) -> None:
        metrics = self._metrics.scheduler
        if decided.round_s is not None:
            metrics.round_took(decided.round_s)
        metrics.observe(decided.event, decided.actions, decided.now_s)
        self._history.record(decided.event, decided.actions, decided.now_s)
        self._count_prompts(decided)

    def _count_prompts(self, decided: Decided) -> None:
        """A prompt's cached tokens are those before the first token that was computed for it."""
        if isinstance(decided.event, Arrival):
            for request in decided.event.requests:
                if request.kind == "prefill":
                    self._prompts[request.request_id] = _Prompt(num_tokens=request.num_prompt_tokens)
        for action in decided.actions:
            match action:
                case Submit(task=task):
                    for item in task.items:
                        prompt = self._prompts.get(item.request_id)
                        if prompt is not None and prompt.num_cached is None:
                            prompt.num_cached = item.start
                case Finish(request_id=request_id, outcome=outcome):
                    prompt = self._prompts.pop(request_id, None)
                    if prompt is not None and outcome == "completed":
                        self._metrics.pod.prompt(prompt.num_tokens, prompt.num_cached or 0)
                case _:
                    pass

    # From the child's API port.

    def loaded(self, load: EngineLoad) -> None:
        """Take in what vLLM says of its load. Its counters are those of one child, from 0."""
        before = self._load or EngineLoad(running=0, waiting=0)
        self._load = load
        self._metrics.pod.generated(max(load.num_generated_tokens - before.num_generated_tokens, 0))
        if self._frame.role == "decode":
            received = load.num_received_tokens - before.num_received_tokens
            self._metrics.kv_transfer.received_tokens(max(received, 0))
        if self._frame.role != "prefill":
            self._metrics.decode.state(
                queued=load.waiting,
                filling=0,
                active=load.running,
                num_steps=max(load.num_steps, before.num_steps),
            )
        self._frame.states.changed()

    # For the frame.

    def state(self, sequence: int) -> PodState:
        """The pod's state now."""
        state = prefill_state(self, self._view, sequence)
        if self._view is None and self._load is not None:  # stock vLLM
            return state.model_copy(update={"waiting": self._load.waiting})
        return state

    def reconfigure(self, live: LiveConfig) -> None:
        """Tell the core of new live settings."""
        self._tell(
            Reconfigure(live=live, settings=scheduler_settings(live), tbt_slo_s=slo_of({}, live).tbt_s)
        )

    def before_scrape(self) -> None:
        """Bring the scheduler's gauges up to date."""
        if self._view is None:
            return
        snapshot = self._view.snapshot
        self._metrics.scheduler.kv(num_blocks=snapshot.kv_blocks, num_free=snapshot.kv_blocks_free)
        self._metrics.scheduler.count_infeasible(self._clock.now_s(), snapshot.prediction)

    def history(self) -> dict[str, object]:
        """The last tasks and preemptions."""
        return self._history.as_json()
