"""The wire form of a pod's state, by role."""

from __future__ import annotations

from typing import Protocol

from flowprefill.engines.protocol import EngineSpec
from flowprefill.execution.decode import DecodeState
from flowprefill.hosting.documents import LiveDocument
from flowprefill.hosting.lifecycle import Lifecycle
from flowprefill.scheduling.snapshot import TaskSnapshot
from flowprefill.server.prefill import SchedulerView
from flowprefill.wire import PodState, TaskState
from flowprefill_crd import LiveConfig, PodConfig


class Stated(Protocol):
    """What states tell of a pod beside its scheduler. `spec` is None where the engine's process tells nothing of itself."""

    @property
    def role(self) -> str: ...

    @property
    def config(self) -> PodConfig: ...

    @property
    def live(self) -> LiveDocument[LiveConfig]: ...

    @property
    def lifecycle(self) -> Lifecycle: ...

    @property
    def spec(self) -> EngineSpec | None: ...


def starting_state(*, role: str, revision: str, sequence: int) -> PodState:
    """The state of a pod that is still loading its model."""
    return PodState(sequence=sequence, role=role, revision=revision, ready=False)


def prefill_state(pod: Stated, view: SchedulerView | None, sequence: int) -> PodState:
    """The state of a pod with a scheduler; without a view, it has had nothing to do yet."""
    base = _base(pod, sequence)
    if view is None:
        return base
    snapshot = view.snapshot
    running = snapshot.running
    return base.model_copy(
        update={
            "running": None if running is None else _task(running, snapshot.now_s),
            "suspended": tuple(_task(task, snapshot.now_s) for task in snapshot.suspended),
            "waiting": snapshot.waiting,
            "waiting_s": snapshot.waiting_s,
            "waiting_tokens": snapshot.waiting_tokens,
            "kv_blocks_free": snapshot.kv_blocks_free,
            "prediction": snapshot.prediction,
            "cached_prefixes": view.cached_prefixes,
        }
    )


def decode_state(pod: Stated, state: DecodeState, sequence: int) -> PodState:
    """The state of a pod that only decodes: `waiting` are jobs that do not run yet."""
    return _base(pod, sequence).model_copy(
        update={
            "waiting": state.queued + state.filling,
            "kv_blocks": state.kv_blocks,
            "kv_blocks_free": state.kv_blocks_free,
        }
    )


def _base(pod: Stated, sequence: int) -> PodState:
    spec = pod.spec
    num_kv_blocks = 0 if spec is None else spec.num_kv_blocks
    return PodState(
        sequence=sequence,
        role=pod.role,
        revision=pod.config.revision,
        ready=pod.lifecycle.ready,
        draining=pod.lifecycle.closes_connections,
        generation=pod.live.current.generation,
        kv_blocks=num_kv_blocks,
        kv_blocks_free=num_kv_blocks,
        block_size=pod.config.engine.block_size if spec is None else spec.block_size,
    )


def _task(task: TaskSnapshot, now_s: float) -> TaskState:
    return TaskState(
        num_tokens=task.num_tokens,
        remaining_s=task.remaining_s,
        deadline_in_s=task.deadline_s - now_s,
        feasible=task.feasible,
    )
