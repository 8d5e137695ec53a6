"""The scheduler: one state machine, `handle(event, now) -> actions`.

Rules of this file
 1. At most one task has the baton. Submit and Resume are emitted only when none has it.
 2. A Preempt is emitted only for a successor that orders strictly before the running task by the policy and that can be
    started once the task has parked: a parked task, or a request whose blocks can be allocated now and for
    whose sake one more task may be suspended.
 3. While a Preempt is pending nothing is submitted. What runs next is decided at Parked, from what is known then.
 4. Tickets strictly increase. A Parked is believed only if its ticket was issued since the task last got the
    baton; then the task stands parked, even when the Preempt was withdrawn meanwhile.
 5. A Completed or Failed that overtakes a Preempt is normal and clears it.
 6. A Preempt whose reason is gone (the urgent request was cancelled, say) is withdrawn.
 7. KV is allocated when a request is first submitted and held while its task is parked and after it completed, until
    CapacityFreed. Blocks enter the prefix cache when the task that computed them completes.
 8. A request gets exactly one Finish. A cancelled member of a task with live members gets it at once and
    its blocks go back when the task ends; a task without a live member gets Cancel.
 9. A parked task may be dropped for an urgent request that lacks KV or a slot (`decision.py`): Cancel, and when
    Failed answers, its live requests wait again. The running task is never dropped.
"""

from __future__ import annotations

from flowprefill.scheduling.actions import Action, Cancel, Finish, Outcome, Resume, Submit
from flowprefill.scheduling.admission import check_ids, refusal
from flowprefill.scheduling.aged_work import AgedWork
from flowprefill.scheduling.batching import build_task
from flowprefill.scheduling.decision import Continue, Drop, Hold, Moment, Start, choose, take_in
from flowprefill.scheduling.events import (
    Arrival,
    Cancelled,
    CapacityFreed,
    Completed,
    Event,
    Failed,
    Parked,
    Progress,
    Reconfigured,
    Tick,
)
from flowprefill.scheduling.kv import KVAccounting
from flowprefill.scheduling.policy import POLICIES
from flowprefill.scheduling.predictor import Predictor
from flowprefill.scheduling.pricing import Pricer
from flowprefill.scheduling.settings import SchedulerSettings
from flowprefill.scheduling.snapshot import Counters, SchedulerSnapshot, take_snapshot
from flowprefill.scheduling.state import ActiveTask, WaitingRequest, slack_s
from flowprefill.scheduling.suspended import Holder
from flowprefill.scheduling.tasks import TaskTable
from flowprefill.scheduling.waiting import WaitingQueue

_LEAST_TICK_S = 1e-6  # a tick lies strictly after the event that set it, whatever rounding says


class Scheduler:
    """Decides what a prefill engine runs. Pure: time comes with events; one thread owns an instance.

    `kv` and `predictor` belong to the scheduler from here on; others read them through `snapshot`.
    """

    def __init__(self, settings: SchedulerSettings, kv: KVAccounting, predictor: Predictor) -> None:
        self.settings = settings
        self.kv = kv
        self.predictor = predictor
        self._queue = WaitingQueue(settings)
        self._tasks = TaskTable()
        self._held: set[str] = set()  # completed requests whose KV others still need
        self._pricer = Pricer(kv, predictor)
        self._aged = AgedWork(settings.ageing, self._queue, self._tasks)
        self._counters = dict.fromkeys(Counters.__dataclass_fields__, 0)
        self._sequence = 0
        self._now_s = 0.0
        self._actions: list[Action] = []
        self._next_tick_s: float | None = None

    # -- what drivers call

    @property
    def next_tick_s(self) -> float | None:
        """When a Tick is wanted if nothing happens before; None when time alone changes no decision."""
        return self._next_tick_s

    def handle(self, event: Event, now_s: float) -> tuple[Action, ...]:
        """What is to be done about `event`, in order.

        `now_s` never falls from call to call. Raises ValueError, before anything changed, when the id of an
        arriving request is in use.
        """
        self._actions = []
        self._now_s = now_s
        self._take_in(event)  # 1. what happened
        self._let_time_pass()  # 2. what time alone changed
        self._decide()  # 3. what to do about it
        self._next_tick_s = self._find_next_tick()  # 4. when to look again
        return tuple(self._actions)

    def snapshot(self, now_s: float) -> SchedulerSnapshot:
        """The state at `now_s`, for state streams and metrics. Changes nothing."""
        return take_snapshot(
            self._queue, self._tasks, self.kv, self.predictor, Counters(**self._counters), now_s
        )

    # -- 1. events

    def _take_in(self, event: Event) -> None:
        if not isinstance(event, Completed):
            self._note(event.progress)
        match event:
            case Arrival():
                self._on_arrival(event)
            case Parked():
                if self._tasks.park(event.task_id, event.ticket):
                    self._count("preemptions")
            case Completed():
                self._on_completed(event)
            case Failed():
                self._on_failed(event)
            case Cancelled():
                self._on_cancelled(event)
            case CapacityFreed():
                for request_id in event.request_ids:
                    if request_id in self._held:
                        self._held.remove(request_id)
                        self.kv.release(request_id)
            case Tick():
                pass
            case Reconfigured():
                self._on_reconfigured(event.settings)

    def _note(self, progress: Progress | None) -> None:
        """Progress of a task; older news than what is known changes nothing."""
        task = self._tasks.get(progress.task_id) if progress is not None else None
        if task is not None and progress is not None:
            task.work_done = min(max(task.work_done, progress.work_done), 1.0)
            self._aged.serve(task, progress.executed_s, self._now_s)

    def _on_arrival(self, event: Arrival) -> None:
        check_ids(event.requests, self._knows)
        for request in event.requests:
            self._count("arrived")
            self._sequence += 1
            waiting = WaitingRequest(request=request, sequence=self._sequence)
            self._pricer.price(waiting)
            refused = refusal(
                waiting,
                settings=self.settings,
                kv=self.kv,
                num_waiting=len(self._queue),
                slack_s=slack_s(request.deadline_s, self._now_s, self.predictor.scale * waiting.base_s),
            )
            if refused is None:
                self._queue.add(waiting)
            else:
                self._finish(request.request_id, *refused)

    def _on_completed(self, event: Completed) -> None:
        task = self._end(event.task_id, event.executed_s)
        if task is None:
            return
        correct = self.settings.online_correction
        items = task.task.items
        if task.task.kind == "decode":
            self.predictor.observe_decode(items[0].num_tokens, event.executed_s, correct=correct)
        else:
            self.predictor.observe(
                [(item.num_tokens, item.start) for item in items],
                event.executed_s,
                predicted_s=task.task.predicted_s,
                correct=correct,
            )
        for member in task.members:
            waiting, item = member.waiting, member.item
            if task.task.kind == "prefill":
                entered = self.kv.commit(waiting.request_id, item.start + item.num_tokens)
                self._pricer.entered(self._queue, entered)
            if not member.live:
                self.kv.release(waiting.request_id)
            elif item.completes:
                if task.task.kind == "prefill":
                    self._held.add(waiting.request_id)
                self._finish(waiting.request_id, "completed")
            else:
                waiting.num_computed = item.start + item.num_tokens
                self._pricer.price(waiting)
                self._queue.add(waiting)

    def _on_failed(self, event: Failed) -> None:
        task = self._end(event.task_id, event.executed_s)
        if task is None:
            return
        for member in task.members:
            self.kv.release(member.waiting.request_id)
            if member.live and task.ending == "recompute" and event.error is None:
                self._start_over(member.waiting)
            elif member.live:
                self._finish(member.waiting.request_id, "failed", event.error or "the task was unwound")

    def _on_cancelled(self, event: Cancelled) -> None:
        waiting = self._queue.get(event.request_id)
        if waiting is not None:
            self._queue.remove(waiting)
            self.kv.release(event.request_id)  # blocks of earlier chunks
            self._finish(event.request_id, "cancelled")
            return
        found = self._tasks.member(event.request_id)
        if found is None or not found[1].live:
            return
        task, member = found
        member.live = False
        self._finish(event.request_id, "cancelled")
        if not task.live():
            if task.ending == "no":
                self._actions.append(Cancel(task_id=task.task_id))
            task.ending = "cancel"
            if task is self._tasks.running:
                self._tasks.pending = None  # it ends either way; a Parked of it is still believed

    def _on_reconfigured(self, settings: SchedulerSettings) -> None:
        if settings.ageing != self.settings.ageing:
            self._aged.configure(settings.ageing)
        if settings != self.settings:
            self.settings = settings
            self._queue.configure(settings)

    # -- 2. time

    def _let_time_pass(self) -> None:
        self._aged.pass_time(self._now_s)
        self._pricer.catch_up(self._queue)
        for waiting in self._queue.lost(self._now_s, self.predictor.scale):
            self._queue.remove(waiting)
            self._finish(waiting.request_id, "shed", "the TTFT target cannot be met any more")

    def _find_next_tick(self) -> float | None:
        """The next moment at which time alone changes what is decided: a slack expiry or an ageing bound."""
        moments = [self._queue.next_loss_s(self.predictor.scale)]
        running = self._tasks.running
        if running is None:
            moments.append(self._aged.next_turn_s(self._now_s))
        elif running.ending == "no" and self._may_preempt() and len(self._queue) + len(self._tasks) > 1:
            moments.append(self._aged.next_turn_s(self._now_s))
            if POLICIES[self.settings.policy].late_at_deadline:
                deadline_s = running.job(self._now_s, self.predictor.scale).deadline_s
                moments.append(deadline_s if deadline_s > self._now_s else None)
        coming = [moment for moment in moments if moment is not None]
        return max(min(coming), self._now_s + _LEAST_TICK_S) if coming else None

    # -- 3. decisions

    def _decide(self) -> None:
        running = self._tasks.running
        if running is not None and (running.ending != "no" or not self._may_preempt()):
            self._withdraw()
            return
        moment = self._moment(self._now_s)
        choice = choose(moment)
        while isinstance(choice, Drop):
            self._drop(choice.holders)
            moment = self._moment(self._now_s)
            choice = choose(moment)
        match choice:
            case Start() | Continue() if running is not None:
                if self._tasks.pending is None:
                    self._actions.append(self._tasks.ask_to_pause())
                    self._count("preempt_requests")
            case Start(head=head):
                self._submit(head, moment)
            case Continue(task=task):
                self._tasks.resume(task)
                self._actions.append(Resume(task_id=task.task_id))
                self._count("resumed")
            case Hold(gathering=gathering):
                self._withdraw()
                if gathering and running is None:
                    self._aged.gather(self._now_s)
        self._pricer.refresh(self._queue, moment.look.seen)

    def _may_preempt(self) -> bool:
        return self.settings.preemption in ("operator", "layer")

    def _withdraw(self) -> None:
        if self._tasks.pending is not None:
            self._actions.append(self._tasks.withdraw())
            self._count("withdrawn")

    def _moment(self, now_s: float) -> Moment:
        return take_in(
            self._queue,
            self._tasks,
            settings=self.settings,
            kv=self.kv,
            scale=self.predictor.scale,
            now_s=now_s,
            boosting=self._aged.boosting,
        )

    def _drop(self, holders: tuple[Holder, ...]) -> None:
        for holder in holders:
            if isinstance(holder.work, ActiveTask):
                holder.work.ending = "recompute"
                self._actions.append(Cancel(task_id=holder.work.task_id))
            else:
                self._queue.remove(holder.work)
                self.kv.release(holder.work.request_id)
                self._start_over(holder.work)

    def _submit(self, head: WaitingRequest, moment: Moment) -> None:
        task = build_task(
            self._tasks.new_id(),
            head,
            moment.look,
            [(ranked.rank, ranked.job) for ranked in moment.parked],
            settings=self.settings,
            kv=self.kv,
            predictor=self.predictor,
            now_s=self._now_s,
        )
        for member in task.members:
            self._queue.remove(member.waiting)
        self._tasks.start(task)
        self._actions.append(Submit(task=task.task))
        self._count("submitted_tasks")

    # -- small things

    def _start_over(self, waiting: WaitingRequest) -> None:
        """The request's KV is gone: it waits for its first token anew."""
        waiting.num_computed = 0
        waiting.recomputes += 1
        self._count("recomputes")
        self._pricer.price(waiting)
        self._queue.add(waiting)

    def _end(self, task_id: int, executed_s: float) -> ActiveTask | None:
        task = self._tasks.get(task_id)
        if task is not None:
            self._aged.serve(task, executed_s, self._now_s)
        return self._tasks.remove(task_id)

    def _knows(self, request_id: str) -> bool:
        return (
            request_id in self._queue
            or self._tasks.member(request_id) is not None
            or request_id in self._held
        )

    def _finish(self, request_id: str, outcome: Outcome, reason: str = "") -> None:
        self._actions.append(Finish(request_id=request_id, outcome=outcome, reason=reason))
        self._count(outcome)

    def _count(self, name: str) -> None:
        self._counters[name] += 1
