"""Metrics of the scheduler: made from events and actions, on the scheduler thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowprefill.metrics.family import Family
from flowprefill.request import Request
from flowprefill.scheduling.actions import Action, Finish, Preempt, Submit, WithdrawPreempt
from flowprefill.scheduling.events import (
    Arrival,
    Cancelled,
    CapacityFreed,
    Completed,
    Event,
    Failed,
    Parked,
    Reconfigured,
    Tick,
)

OTHER = "other"
"""The `slo_class` of a class that the live document does not name."""

FAST_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
ROUND_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2, 1.0)
SIGNED_S = (
    -10.0,
    -3.0,
    -1.0,
    -0.3,
    -0.1,
    -0.03,
    -0.01,
    -0.003,
    0.0,
    0.003,
    0.01,
    0.03,
    0.1,
    0.3,
    1.0,
    3.0,
    10.0,
)
SLACK_S = (-60.0, -10.0, -3.0, -1.0, -0.3, -0.1, 0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 300.0)

_EVENT_NAMES: dict[type[Event], str] = {
    Arrival: "arrival",
    Parked: "parked",
    Completed: "completion",
    Failed: "failure",
    Cancelled: "cancellation",
    CapacityFreed: "capacity",
    Tick: "tick",
    Reconfigured: "reconfiguration",
}
EVENT_NAMES = tuple(_EVENT_NAMES.values())


@dataclass(slots=True, kw_only=True)
class _Waiting:
    slo_class: str
    deadline_s: float
    num_tokens: int


class SchedulerMetrics:
    """Fed with each event and the actions it led to, on the scheduler thread.

    `classes` closes the set of `slo_class` values; `set_classes` follows the live document.
    """

    def __init__(self, family: Family, classes: Sequence[str]) -> None:
        self._preemptions = family.counter(
            "flowprefill_prefill_preemptions_total", "Prefill batches paused for a more urgent one."
        )
        self._blocking_s = family.histogram(
            "flowprefill_preemption_blocking_seconds",
            "Time from the event that asked for a preemption until the running batch yielded.",
            buckets=FAST_S,
        )
        self._rounds = family.counter(
            "flowprefill_scheduler_rounds_total", "Scheduling rounds, by the event that caused them.", "event"
        )
        self._round_s = family.histogram(
            "flowprefill_scheduler_round_seconds", "Time of one scheduling round.", buckets=ROUND_S
        )
        self._queue = family.gauge(
            "flowprefill_queue_requests", "Requests that wait in this pod.", "slo_class"
        )
        self._slack_s = family.histogram(
            "flowprefill_queue_slack_seconds",
            "Slack of requests when they leave the queue: deadline less now less predicted time.",
            buckets=SLACK_S,
        )
        self._infeasible = family.gauge(
            "flowprefill_queue_infeasible_requests",
            "Waiting requests that can no longer meet their deadline.",
        )
        self._error_s = family.histogram(
            "flowprefill_ttft_prediction_error_seconds",
            "Predicted less executed time of completed prefill batches.",
            buckets=SIGNED_S,
        )
        self._prefill_s = family.histogram(
            "flowprefill_prefill_seconds",
            "Engine time of completed prefill batches, paused time excluded.",
            buckets=FAST_S,
        )
        self._predictor = family.gauge(
            "flowprefill_predictor_info",
            "1; the labels say where the predictor's profile comes from.",
            "version",
            "model",
            "tp",
            "gpu",
            "created",
        )
        self._kv_blocks = family.gauge("flowprefill_kv_blocks", "KV blocks of this pod.")
        self._kv_free = family.gauge("flowprefill_kv_blocks_free", "KV blocks that are free or evictable.")
        self._waiting: dict[str, _Waiting] = {}
        self._pauses: dict[tuple[int, int], float] = {}
        self._predicted_s: dict[int, float] = {}
        self._counts: dict[str, int] = {}
        self._classes: frozenset[str] = frozenset()
        self.set_classes(classes)
        for name in EVENT_NAMES:
            self._rounds(event=name)

    def set_classes(self, classes: Sequence[str]) -> None:
        """Close the set of `slo_class` values; classes that are gone keep no series."""
        for gone in self._classes - set(classes):
            self._queue.forget(slo_class=gone)
        self._classes = frozenset(classes)
        for name in (*classes, OTHER):
            self._queue(slo_class=name).set(self._counts.get(name, 0))

    def forget_waiting(self) -> None:
        """Start over: events were missed, and what waits, runs or was asked to pause is not known any more."""
        self._waiting.clear()
        self._pauses.clear()
        self._predicted_s.clear()
        for name in self._counts:
            self._count(name, -self._counts[name])

    def predictor(self, *, version: str, model: str, tp: int, gpu: str, created: str) -> None:
        """Say where the profile comes from."""
        self._predictor(version=version, model=model, tp=str(tp), gpu=gpu, created=created).set(1)

    def count_infeasible(self, now_s: float, prediction: tuple[float, float, float, float]) -> None:
        """Count waiting requests whose predicted time, without cached prefix, exceeds what is left. At scrapes."""
        a, b, c, _ = prediction
        late = [
            waiting
            for waiting in list(self._waiting.values())
            if waiting.deadline_s - now_s < a + waiting.num_tokens * (b + c * waiting.num_tokens)
        ]
        self._infeasible().set(len(late))

    def kv(self, *, num_blocks: int, num_free: int) -> None:
        self._kv_blocks().set(num_blocks)
        self._kv_free().set(num_free)

    def round_took(self, seconds: float) -> None:
        self._round_s().observe(seconds)

    def observe(self, event: Event, actions: Sequence[Action], now_s: float) -> None:
        """Take in one scheduling round."""
        self._rounds(event=_EVENT_NAMES[type(event)]).inc()
        match event:
            case Arrival(requests=requests):
                for request in requests:
                    if request.kind == "prefill":
                        self._enter(request)
            case Parked(task_id=task_id, ticket=ticket):
                if (asked_s := self._pauses.pop((task_id, ticket), None)) is not None:
                    self._blocking_s().observe(now_s - asked_s)
                    self._preemptions().inc()
            case Completed(task_id=task_id, executed_s=executed_s):
                self._task_ended(task_id, now_s)
                if (predicted_s := self._predicted_s.pop(task_id, None)) is not None:
                    self._prefill_s().observe(executed_s)
                    self._error_s().observe(predicted_s - executed_s)
            case Failed(task_id=task_id):
                self._task_ended(task_id, now_s)
                self._predicted_s.pop(task_id, None)
            case _:
                pass
        for action in actions:
            self._observe_action(action, now_s)

    def _observe_action(self, action: Action, now_s: float) -> None:
        match action:
            case Submit(task=task) if task.kind == "prefill":
                self._predicted_s[task.task_id] = task.predicted_s
                for item in task.items:
                    if (waiting := self._leave(item.request_id)) is not None:
                        self._slack_s().observe(waiting.deadline_s - now_s - task.predicted_s)
            case Preempt(task_id=task_id, ticket=ticket):
                self._pauses[(task_id, ticket)] = now_s
            case WithdrawPreempt(task_id=task_id, ticket=ticket):
                self._pauses.pop((task_id, ticket), None)
            case Finish(request_id=request_id):
                self._leave(request_id)
            case _:
                pass

    def _task_ended(self, task_id: int, now_s: float) -> None:
        """A task that ends before it parks yields the engine as well."""
        for key in [key for key in self._pauses if key[0] == task_id]:
            self._blocking_s().observe(now_s - self._pauses.pop(key))

    def _enter(self, request: Request) -> None:
        name = request.slo_class if request.slo_class in self._classes else OTHER
        self._waiting[request.request_id] = _Waiting(
            slo_class=name, deadline_s=request.deadline_s, num_tokens=request.num_prompt_tokens
        )
        self._count(name, 1)

    def _leave(self, request_id: str) -> _Waiting | None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._count(waiting.slo_class, -1)
        return waiting

    def _count(self, slo_class: str, change: int) -> None:
        count = self._counts.get(slo_class, 0) + change
        self._counts[slo_class] = count
        if slo_class in self._classes or slo_class == OTHER:
            self._queue(slo_class=slo_class).set(count)
