"""What the scheduler tells others about itself: state streams, placement, metrics."""

from __future__ import annotations

from dataclasses import dataclass

from flowprefill.request import Kind
from flowprefill.scheduling.kv import KVAccounting
from flowprefill.scheduling.predictor import Coefficients, Predictor
from flowprefill.scheduling.state import ActiveTask, slack_s
from flowprefill.scheduling.tasks import TaskTable
from flowprefill.scheduling.waiting import WaitingQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSnapshot:
    """A running or suspended task. `num_tokens` are the tokens it computes; `deadline_s` is on the scheduler's clock."""

    task_id: int
    kind: Kind
    num_requests: int
    num_tokens: int
    remaining_s: float
    deadline_s: float
    feasible: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """How often things happened since the start. Every admitted request is in one of the five outcomes or not done."""

    arrived: int = 0
    submitted_tasks: int = 0
    preempt_requests: int = 0
    preemptions: int = 0
    withdrawn: int = 0
    resumed: int = 0
    recomputes: int = 0
    completed: int = 0
    failed: int = 0
    rejected: int = 0
    shed: int = 0
    cancelled: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSnapshot:
    """The scheduler at one moment.

    `suspended` tasks come by deadline. `waiting_s` is the predicted time of all waiting requests, each alone, and
    `waiting_tokens` what they have to compute, net of cached prefix.
    `prediction` are the coefficients in use, online correction included.
    """

    now_s: float
    running: TaskSnapshot | None
    suspended: tuple[TaskSnapshot, ...]
    waiting: int
    waiting_s: float
    waiting_tokens: int
    kv_blocks: int
    kv_blocks_free: int
    preempting: bool
    prediction: Coefficients
    counters: Counters


def describe(task: ActiveTask, now_s: float, scale: float) -> TaskSnapshot:
    """A task as others see it."""
    job = task.job(now_s, scale)
    return TaskSnapshot(
        task_id=task.task_id,
        kind=task.task.kind,
        num_requests=len(task.members),
        num_tokens=sum(item.num_tokens for item in task.task.items),
        remaining_s=job.remaining_s,
        deadline_s=job.deadline_s,
        feasible=slack_s(job.deadline_s, now_s, job.remaining_s) > 0.0,
    )


def take_snapshot(
    queue: WaitingQueue,
    tasks: TaskTable,
    kv: KVAccounting,
    predictor: Predictor,
    counters: Counters,
    now_s: float,
) -> SchedulerSnapshot:
    """The scheduler's state at `now_s`. Changes nothing and does not look at the waiting one by one."""
    scale = predictor.scale
    suspended = [describe(task, now_s, scale) for task in tasks.parked()]
    return SchedulerSnapshot(
        now_s=now_s,
        running=None if tasks.running is None else describe(tasks.running, now_s, scale),
        suspended=tuple(sorted(suspended, key=lambda task: (task.deadline_s, task.task_id))),
        waiting=len(queue),
        waiting_s=scale * queue.base_s,
        waiting_tokens=queue.num_tokens,
        kv_blocks=kv.num_blocks,
        kv_blocks_free=kv.num_free,
        preempting=tasks.pending is not None,
        prediction=predictor.scaled_coefficients,
        counters=counters,
    )
