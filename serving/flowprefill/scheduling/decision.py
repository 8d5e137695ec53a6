"""What should run next, as a value. Reads the state of one moment and changes nothing.

Rules of this file
1. Parked tasks and waiting requests compete in one order; while a task runs only what orders strictly before it counts,
   and of the waiting only those whose deadline the policy has not given up: pausing for a lost one gains nothing.
2. A waiting request counts only if its blocks can be allocated now, and if the tasks then suspended stay within
   `max_suspended`. Those behind it in the order may go first meanwhile, except when it is an aged request's turn:
   then nothing new starts, so that blocks gather for it. An engine idle for that counts as service to it.
3. For a request that can still meet its deadline (or an aged one) work behind it may be dropped to free KV. An idle
   engine waits for blocks that unwinding tasks are about to give back: it takes a moment only.
4. When every slot of `max_suspended` is taken, a parked task whose deadline is lost is dropped for one that can still
   be met. Otherwise overload fills the slots with lost work that nobody resumes, and preemption ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowprefill.scheduling.ageing import has_aged
from flowprefill.scheduling.kv import KVAccounting
from flowprefill.scheduling.ordering import Rank
from flowprefill.scheduling.policy import POLICIES
from flowprefill.scheduling.settings import SchedulerSettings
from flowprefill.scheduling.state import ActiveTask, Job, WaitingRequest, slack_s
from flowprefill.scheduling.suspended import Holder, victims
from flowprefill.scheduling.tasks import TaskTable
from flowprefill.scheduling.waiting import AGED_TIER, Look, WaitingQueue

_MAX_TRIES = 4  # requests without blocks for which one decision considers dropping others


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Submit a batch around this request."""

    head: WaitingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Continue:
    """Give the baton to this parked task."""

    task: ActiveTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Throw this progress away, then look again."""

    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Nothing can or should run before what is in hand, or blocks are about to come free.

    `gathering` says that requests could start but must not, so that an aged one finds its blocks.
    """

    gathering: bool = False


Choice = Start | Continue | Drop | Hold


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedTask:
    """A task as the policy sees it now; `aged` says whether the request it was made for has aged."""

    task: ActiveTask
    job: Job
    rank: Rank
    aged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Everything a choice depends on.

    `parked` are the tasks that could be resumed, best first; `unwinding` the parked ones that were told to end.
    `started` are requests between two chunks, as holders of KV.
    """

    settings: SchedulerSettings
    kv: KVAccounting
    now_s: float
    scale: float
    look: Look
    running: RankedTask | None
    parked: Sequence[RankedTask]
    unwinding: Sequence[ActiveTask]
    started: Sequence[Holder]

    @property
    def num_tasks(self) -> int:
        """Tasks that are suspended when something new starts."""
        return len(self.parked) + len(self.unwinding) + (1 if self.running is not None else 0)


def take_in(
    queue: WaitingQueue,
    tasks: TaskTable,
    *,
    settings: SchedulerSettings,
    kv: KVAccounting,
    scale: float,
    now_s: float,
    boosting: bool,
) -> Moment:
    """The state of queue and tasks at `now_s`, ranked."""

    def aged(waiting: WaitingRequest) -> bool:
        return has_aged(waiting, settings.ageing, now_s)

    jobs = {task.task_id: task.job(now_s, scale) for task in tasks.all()}
    competing = [jobs[task.task_id] for task in tasks.all() if task.ending == "no"]
    look = queue.look(now_s, scale, competing, boosting=boosting)
    ranked = {
        task.task_id: RankedTask(
            task=task,
            job=jobs[task.task_id],
            rank=look.rank(jobs[task.task_id], aged=aged(task.members[0].waiting)),
            aged=aged(task.members[0].waiting),
        )
        for task in tasks.all()
    }
    parked = tasks.parked()
    started = [
        Holder(
            work=waiting,
            rank=look.rank(waiting.job(scale), aged=aged(waiting)),
            deadline_s=waiting.request.deadline_s,
        )
        for waiting in queue.started
    ]
    return Moment(
        settings=settings,
        kv=kv,
        now_s=now_s,
        scale=scale,
        look=look,
        running=ranked[tasks.running.task_id] if tasks.running is not None else None,
        parked=sorted((ranked[t.task_id] for t in parked if t.ending == "no"), key=lambda r: r.rank),
        unwinding=[task for task in parked if task.ending != "no"],
        started=started,
    )


def choose(moment: Moment) -> Choice:
    """What should have the baton instead of the running task, or instead of nothing when none runs."""
    running = moment.running
    limit = running.rank if running is not None else None
    best = moment.parked[0] if moment.parked else None
    if best is not None and (limit is None or best.rank < limit):
        limit = best.rank
    else:
        best = None
    if moment.num_tasks <= moment.settings.max_suspended or (running is None and best is None):
        choice = _first_startable(moment, limit)
        if choice is not None and (best is None or choice != Hold(gathering=True)):
            return choice
    elif best is None and limit is not None:
        return _free_slot(moment, limit)
    return Continue(task=best.task) if best is not None else Hold()


def _first_startable(moment: Moment, limit: Rank | None) -> Choice | None:
    """The best waiting request before `limit` that can start; None when there is none."""
    gathering = False
    tries = _MAX_TRIES
    policy = POLICIES[moment.settings.policy]
    for rank, waiting in moment.look:
        if limit is not None and rank >= limit:
            break
        if moment.running is not None and policy.lost(rank):
            break
        if not _needs_blocks(waiting):
            return Start(head=waiting)
        if gathering:
            continue
        shortage = _shortage(moment.kv, waiting)
        if shortage <= 0:
            return Start(head=waiting)
        if tries > 0:
            tries -= 1
            choice = _free_blocks(moment, waiting, rank, shortage)
            if isinstance(choice, Drop) or (choice is not None and moment.running is None):
                return choice
        gathering = rank[0] == AGED_TIER
    return Hold(gathering=True) if gathering else None


def _free_slot(moment: Moment, limit: Rank) -> Choice:
    """How one more task could be suspended for the sake of the best waiting request, with all slots taken.

    Parked work whose deadline is lost makes room, the least work first, but for the oldest that has aged: it shall get
    to its end.
    """
    first = next(iter(moment.look), None)
    policy = POLICIES[moment.settings.policy]
    if first is None or first[0] >= limit or moment.unwinding or not moment.settings.recompute_suspended:
        return Hold()
    rank, waiting = first
    slack = slack_s(waiting.request.deadline_s, moment.now_s, moment.scale * waiting.base_s)
    if slack <= 0.0 or (_needs_blocks(waiting) and _shortage(moment.kv, waiting) > 0):
        return Hold()
    aged = [parked for parked in moment.parked if parked.aged]
    oldest = min(aged, key=lambda parked: (parked.job.arrival_s, parked.job.sequence)) if aged else None
    lost = [p for p in moment.parked if policy.lost(p.rank) and p is not oldest and p.rank > rank]
    if not lost:
        return Hold()
    least = min(lost, key=lambda parked: (parked.task.executed_s, parked.task.task_id))
    return Drop(holders=(Holder(work=least.task, rank=least.rank, deadline_s=least.job.deadline_s),))


def _free_blocks(moment: Moment, urgent: WaitingRequest, rank: Rank, shortage: int) -> Choice | None:
    """How blocks can come free for `urgent` without waiting for work to end; None when they cannot."""
    kv = moment.kv
    coming = kv.reclaimable(m.waiting.request_id for task in moment.unwinding for m in task.members)
    if coming >= shortage:
        return Hold()
    slack = slack_s(urgent.request.deadline_s, moment.now_s, moment.scale * urgent.base_s)
    if not moment.settings.recompute_suspended or (slack <= 0.0 and rank[0] != AGED_TIER):
        return None
    parked = [Holder(work=p.task, rank=p.rank, deadline_s=p.job.deadline_s) for p in moment.parked]
    dropped = victims([*parked, *moment.started], rank, shortage - coming, kv)
    return Drop(holders=dropped) if dropped else None


def _needs_blocks(waiting: WaitingRequest) -> bool:
    return waiting.request.kind == "prefill" and not waiting.started


def _shortage(kv: KVAccounting, waiting: WaitingRequest) -> int:
    return kv.shortage(waiting.request.num_prompt_tokens, waiting.request.prefix_hashes)
