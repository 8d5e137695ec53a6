"""The scheduler: one state machine, `handle(event, now) -> actions`.

Rules of this file
 1. At most one task has the baton (`_running`). Submit and Resume are emitted only when none has it.
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
 9. A parked task may be dropped for an urgent request that lacks KV (`suspended.py`): Cancel, and when Failed
    answers, its live requests wait again. Nothing else is started in between, for it takes a moment only.
"""

from __future__ import annotations

from flowprefill.scheduling.actions import (
    Action,
    Cancel,
    Finish,
    Outcome,
    Resume,
    Submit,
    Task,
    TaskItem,
)
from flowprefill.scheduling.admission import refusal
from flowprefill.scheduling.ageing import ServiceAccount, aged_fraction, has_aged
from flowprefill.scheduling.batching import BatchFiller, cached_tokens
from flowprefill.scheduling.decision import Continue, Drop, Hold, Moment, RankedTask, Start, choose
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
from flowprefill.scheduling.kv import KVCachePool
from flowprefill.scheduling.policy import POLICIES
from flowprefill.scheduling.predictor import Predictor
from flowprefill.scheduling.settings import SchedulerSettings
from flowprefill.scheduling.snapshot import Counters, SchedulerSnapshot, TaskSnapshot
from flowprefill.scheduling.state import ActiveTask, Member, WaitingRequest, slack_s
from flowprefill.scheduling.suspended import Holder
from flowprefill.scheduling.tasks import TaskTable
from flowprefill.scheduling.waiting import WaitingQueue

_LEAST_TICK_S = 1e-6  # a tick lies strictly after the event that set it, whatever rounding says


class Scheduler:
    """Decides what a prefill engine runs. Pure: time comes with events; one thread owns an instance.

    `kv` and `predictor` belong to the scheduler from here on; others read them through `snapshot`.
    """

    def __init__(self, settings: SchedulerSettings, kv: KVCachePool, predictor: Predictor) -> None:
        self.settings = settings
        self.kv = kv
        self.predictor = predictor
        self._queue = WaitingQueue(settings)
        self._tasks = TaskTable()
        self._held: set[str] = set()  # completed requests whose KV others still need
        self._account = ServiceAccount(settings.ageing) if settings.ageing is not None else None
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
        moment = self._moment(now_s)
        running = self._tasks.running
        parked = [ranked.task for ranked in moment.parked] + list(moment.unwinding)
        return SchedulerSnapshot(
            now_s=now_s,
            running=None if running is None else self._task_snapshot(running, now_s),
            suspended=tuple(self._task_snapshot(task, now_s) for task in parked),
            waiting=len(self._queue),
            waiting_s=self.predictor.scale * self._queue.base_s,
            kv_blocks=self.kv.num_blocks,
            kv_blocks_free=self.kv.num_free,
            preempting=self._tasks.pending is not None,
            prediction=self.predictor.scaled_coefficients,
            counters=Counters(**self._counters),
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
            self._serve(task, progress.executed_s)

    def _serve(self, task: ActiveTask, executed_s: float) -> None:
        """Count the time the task held the baton since it was last heard of."""
        gained_s = executed_s - task.executed_s
        if gained_s > 0.0:
            task.executed_s = executed_s
            if self._account is not None:
                self._account.served(gained_s, self._aged_fraction(task), backlog=self._has_aged_work())

    def _on_arrival(self, event: Arrival) -> None:
        seen: set[str] = set()
        for request in event.requests:
            if request.request_id in seen or self._knows(request.request_id):
                raise ValueError(
                    f"request id {request.request_id!r} is in use; an id is free again once its request has "
                    f"finished and its KV was given back"
                )
            seen.add(request.request_id)
        for request in event.requests:
            self._count("arrived")
            self._sequence += 1
            waiting = WaitingRequest(request=request, sequence=self._sequence)
            self._price(waiting)
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
                self.kv.commit(waiting.request_id, item.start + item.num_tokens)
            if not member.live:
                self.kv.release(waiting.request_id)
            elif item.completes:
                if task.task.kind == "prefill":
                    self._held.add(waiting.request_id)
                self._finish(waiting.request_id, "completed")
            else:
                waiting.num_computed = item.start + item.num_tokens
                self._price(waiting)
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
            self._account = ServiceAccount(settings.ageing) if settings.ageing is not None else None
        if settings != self.settings:
            self.settings = settings
            self._queue.configure(settings)

    # -- 2. time

    def _let_time_pass(self) -> None:
        if self._queue.aged is not None:
            self._queue.aged.advance(self._now_s)
        if self._account is not None and not self._has_aged_work():
            self._account.served(0.0, 0.0, backlog=False)
        for waiting in self._queue.lost(self._now_s, self.predictor.scale):
            self._queue.remove(waiting)
            self._finish(waiting.request_id, "shed", "the TTFT target cannot be met any more")

    def _find_next_tick(self) -> float | None:
        """The next moment at which time alone would change what is decided."""
        running = self._tasks.running
        moments: list[float] = []
        loss_s = self._queue.next_loss_s(self.predictor.scale)
        if loss_s is not None:
            moments.append(loss_s)
        if running is not None and running.ending == "no" and self._may_preempt():
            others = len(self._queue) > 0 or len(self._tasks) > 1
            if others and POLICIES[self.settings.policy].late_at_deadline:
                deadline_s = running.job(self._now_s, self.predictor.scale).deadline_s
                if deadline_s > self._now_s:
                    moments.append(deadline_s)
            if others and self._account is not None and self._queue.aged is not None:
                if self._has_aged_work():
                    turn_s = self._account.turns_in_s(self._aged_fraction(running))
                    moments.extend([] if turn_s is None else [self._now_s + turn_s])
                elif self._queue.aged.next_s is not None:
                    moments.append(self._queue.aged.next_s)
        return max(min(moments), self._now_s + _LEAST_TICK_S) if moments else None

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
            if any(isinstance(holder.work, ActiveTask) for holder in choice.holders):
                return  # their blocks come with Failed
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
            case Hold():
                self._withdraw()
        self._refresh(moment.look.seen)

    def _may_preempt(self) -> bool:
        return self.settings.preemption in ("operator", "layer")

    def _withdraw(self) -> None:
        if self._tasks.pending is not None:
            self._actions.append(self._tasks.withdraw())
            self._count("withdrawn")

    def _moment(self, now_s: float) -> Moment:
        scale = self.predictor.scale
        tasks = self._tasks.all()
        jobs = {task.task_id: task.job(now_s, scale) for task in tasks}
        boosting = self._account is not None and self._account.boosting
        look = self._queue.look(
            now_s, scale, [jobs[t.task_id] for t in tasks if t.ending == "no"], boosting=boosting
        )
        ranked = {
            task.task_id: RankedTask(
                task=task,
                job=jobs[task.task_id],
                rank=look.rank(jobs[task.task_id], aged=self._has_aged(task.members[0].waiting, now_s)),
            )
            for task in tasks
        }
        running = self._tasks.running
        parked = self._tasks.parked()
        return Moment(
            settings=self.settings,
            kv=self.kv,
            now_s=now_s,
            scale=scale,
            look=look,
            running=ranked[running.task_id] if running is not None else None,
            parked=sorted((ranked[t.task_id] for t in parked if t.ending == "no"), key=lambda r: r.rank),
            unwinding=[task for task in parked if task.ending != "no"],
            started=[
                Holder(
                    work=waiting,
                    rank=look.rank(waiting.job(scale), aged=self._has_aged(waiting, now_s)),
                    deadline_s=waiting.request.deadline_s,
                )
                for waiting in self._queue.started
            ],
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
        request = head.request
        if request.kind == "decode":
            item = TaskItem(
                request_id=request.request_id,
                start=0,
                num_tokens=request.num_prompt_tokens,
                block_ids=(),
                completes=True,
            )
            members, base_s = [Member(waiting=head, item=item)], head.base_s
        else:
            filler = BatchFiller(self.settings, self.kv, self.predictor, moment.now_s)
            batch = filler.fill(head, moment.look, [(ranked.rank, ranked.job) for ranked in moment.parked])
            members, base_s = batch.members, batch.base_s
        task = ActiveTask(
            task=Task(
                task_id=self._tasks.new_id(),
                items=tuple(member.item for member in members),
                predicted_s=self.predictor.scale * base_s,
                granularity="operator" if self.settings.preemption == "operator" else "layer",
                kind=request.kind,
            ),
            members=tuple(members),
            base_s=base_s,
        )
        for member in members:
            self._queue.remove(member.waiting)
        self._tasks.start(task)
        self._actions.append(Submit(task=task.task))
        self._count("submitted_tasks")

    # -- small things

    def _price(self, waiting: WaitingRequest) -> None:
        """Look up what the request needs alone, given what is cached now. Not while an order holds it."""
        request = waiting.request
        waiting.cache_version = self.kv.cache_version
        if request.kind == "decode":  # has a correction of its own, so the common scale is taken out
            waiting.base_s = self.predictor.predict_decode_s(request.num_prompt_tokens) / self.predictor.scale
            return
        waiting.num_cached = cached_tokens(waiting, self.kv)
        num_new = request.num_prompt_tokens - waiting.num_cached
        waiting.base_s = self.predictor.base_s(num_new, waiting.num_cached)

    def _refresh(self, looked_at: list[WaitingRequest]) -> None:
        """Price again those that a decision came across and whose cached prefix may have changed since."""
        for waiting in looked_at:
            if waiting.cache_version == self.kv.cache_version or waiting.request_id not in self._queue:
                continue
            waiting.cache_version = self.kv.cache_version
            num_cached = cached_tokens(waiting, self.kv)
            if num_cached != waiting.num_cached:
                num_new = waiting.request.num_prompt_tokens - num_cached
                base_s = self.predictor.base_s(num_new, num_cached)
                self._queue.reprice(waiting, base_s=base_s, num_cached=num_cached)

    def _start_over(self, waiting: WaitingRequest) -> None:
        """The request's KV is gone: it waits for its first token anew."""
        waiting.num_computed = 0
        waiting.recomputes += 1
        self._count("recomputes")
        self._price(waiting)
        self._queue.add(waiting)

    def _end(self, task_id: int, executed_s: float) -> ActiveTask | None:
        task = self._tasks.get(task_id)
        if task is not None:
            self._serve(task, executed_s)
        return self._tasks.remove(task_id)

    def _knows(self, request_id: str) -> bool:
        return (
            request_id in self._queue
            or self._tasks.member(request_id) is not None
            or request_id in self._held
        )

    def _has_aged(self, waiting: WaitingRequest, now_s: float) -> bool:
        return has_aged(waiting, self.settings.ageing, now_s)

    def _aged_fraction(self, task: ActiveTask) -> float:
        return aged_fraction(task, self.settings.ageing, self._now_s)

    def _has_aged_work(self) -> bool:
        """Whether work exists that ageing protects: waiting, parked or running."""
        if self._queue.aged is None:
            return False
        return self._queue.aged.any_aged or any(self._aged_fraction(t) > 0.0 for t in self._tasks.all())

    def _finish(self, request_id: str, outcome: Outcome, reason: str = "") -> None:
        self._actions.append(Finish(request_id=request_id, outcome=outcome, reason=reason))
        self._count(outcome)

    def _count(self, name: str) -> None:
        self._counters[name] += 1

    def _task_snapshot(self, task: ActiveTask, now_s: float) -> TaskSnapshot:
        job = task.job(now_s, self.predictor.scale)
        return TaskSnapshot(
            task_id=task.task_id,
            kind=task.task.kind,
            num_requests=len(task.members),
            num_tokens=sum(item.num_tokens for item in task.task.items),
            remaining_s=job.remaining_s,
            deadline_s=job.deadline_s,
            feasible=slack_s(job.deadline_s, now_s, job.remaining_s) > 0.0,
        )
