"""The wire form of a pod's state, by role."""

from __future__ import annotations

from flowprefill.execution.decode import DecodeState
from flowprefill.scheduling.snapshot import TaskSnapshot
from flowprefill.server.prefill import SchedulerView
from flowprefill.server.role import Pod
from flowprefill.wire import PodState, TaskState


def starting_state(*, role: str, revision: str, sequence: int) -> PodState:
    """The state of a pod that is still loading its model."""
    return PodState(sequence=sequence, role=role, revision=revision, ready=False)


def prefill_state(pod: Pod, view: SchedulerView | None, sequence: int) -> PodState:
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


def decode_state(pod: Pod, state: DecodeState, sequence: int) -> PodState:
    """The state of a pod that only decodes: `waiting` are jobs that do not run yet."""
    return _base(pod, sequence).model_copy(
        update={
            "waiting": state.queued + state.filling,
            "kv_blocks": state.kv_blocks,
            "kv_blocks_free": state.kv_blocks_free,
        }
    )


def _base(pod: Pod, sequence: int) -> PodState:
    spec = pod.engine.spec
    return PodState(
        sequence=sequence,
        role=pod.role,
        revision=pod.config.revision,
        ready=pod.lifecycle.ready,
        draining=pod.lifecycle.closes_connections,
        generation=pod.live.current.generation,
        kv_blocks=spec.num_kv_blocks,
        kv_blocks_free=spec.num_kv_blocks,
        block_size=spec.block_size,
    )


def _task(task: TaskSnapshot, now_s: float) -> TaskState:
    return TaskState(
        num_tokens=task.num_tokens,
        remaining_s=task.remaining_s,
        deadline_in_s=task.deadline_s - now_s,
        feasible=task.feasible,
    )
