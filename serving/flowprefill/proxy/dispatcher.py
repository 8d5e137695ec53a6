"""Holds requests in policy order until placement says where they go. Effects around the pure `placement`.

Lives on the event loop. A round runs after every arrival, every change of the pods and every answer of a leg
(coalesced), and at the moments when time alone can change something: a state line settles, a request's slack
or its wait for a pod runs out.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flowprefill.clock import Clock
from flowprefill.errors import QueueFull, Shed, Unavailable
from flowprefill.proxy.ordering import WaitingQueue
from flowprefill.proxy.placement import (
    SETTLE_S,
    SOON_S,
    Choice,
    Outstanding,
    Pod,
    Rules,
    best_case_s,
    choose,
    choose_for_aged,
    predict_s,
)
from flowprefill.proxy.pods import DecodePod, PodTable
from flowprefill.proxy.rate import LearnedRate
from flowprefill.proxy.settings import LiveSettings
from flowprefill.request import Request
from flowprefill.wire import Endpoint

log = logging.getLogger(__name__)

HEADS_PER_ROUND = 8
"""Requests a round looks at. One that places them all is followed by another."""

TIMER_SLACK_S = 0.001


@dataclass(slots=True, kw_only=True)
class Placement:
    """A place at a prefill (or colocated) pod, and the decode pod that follows.

    It counts against both pods until released; `release_*` may be called any number of times, counting once.
    """

    request: Request
    first: Endpoint
    choice: Choice
    decode: DecodePod | None
    dispatched_s: float
    _on_release: Callable[[bool], None] = lambda answered: None
    _holds_first: bool = True
    _num_sequences: int = 0

    def release_first(self, *, answered: bool = False) -> None:
        """The first leg answered or failed: the pod no longer holds this request."""
        if self._holds_first:
            self._holds_first = False
            self._on_release(answered)

    def hold_decode(self, pod: DecodePod | None, num_sequences: int) -> None:
        """Count `num_sequences` on `pod` instead of on the decode pod counted so far."""
        self.release_decode()
        self.decode = pod
        if pod is not None:
            pod.num_sequences += num_sequences
            self._num_sequences = num_sequences

    def release_decode(self) -> None:
        if self.decode is not None:
            self.decode.num_sequences -= self._num_sequences
        self._num_sequences = 0

    def release(self) -> None:
        self.release_first()
        self.release_decode()


@dataclass(slots=True, kw_only=True)
class _Waiter:
    request: Request
    future: asyncio.Future[Placement]
    avoid: frozenset[str]
    num_sequences: int
    since_s: float


@dataclass(slots=True)
class Dispatcher:
    """The proxy's one queue. `place` waits in it; everything else makes rounds run."""

    clock: Clock
    pods: PodTable
    live: LiveSettings
    queue_limit: int
    pod_wait_s: float
    closed: bool = False
    _waiters: dict[str, _Waiter] = field(default_factory=dict)
    _queue: WaitingQueue = field(init=False)
    _round_due: bool = False
    _timer: asyncio.TimerHandle | None = None
    _podless_since_s: float | None = None
    _learned: LearnedRate = field(default_factory=LearnedRate)
    _alone: dict[str, str | None] = field(default_factory=dict)  # pod -> the request that had it to itself
    _sheds: list[tuple[float, str]] = field(default_factory=list)  # heap of (look again at, id)

    def __post_init__(self) -> None:
        self._queue = WaitingQueue(self.live.policy, self.live.ageing)

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    def waiting(self) -> Iterable[Request]:
        """Requests in the queue, in no particular order."""
        return (w.request for w in self._waiters.values())

    async def place(
        self, request: Request, *, num_sequences: int = 1, avoid: frozenset[str] = frozenset()
    ) -> Placement:
        """Wait in policy order for a place. The caller releases it, whatever happens.

        Raises QueueFull when the queue is full, Shed when the request's class asks to be told and no pod can
        meet its deadline, Unavailable when no pod is there within `pod_wait_s` or the proxy closes.
        """
        if self.closed:
            raise Unavailable("the proxy is shutting down; try another one")
        if len(self._waiters) >= self.queue_limit:
            raise QueueFull(
                f"{len(self._waiters)} requests wait already, which is the limit; try again later"
            )
        now_s = self.clock.now_s()
        future: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(
            request=request, future=future, avoid=avoid, num_sequences=num_sequences, since_s=now_s
        )
        self._waiters[request.request_id] = waiter
        self._queue.add(request, predict_s(self._rules().coefficients, request.num_prompt_tokens, 0))
        if request.shed_when_infeasible:
            heapq.heappush(self._sheds, (now_s, request.request_id))
        self.wake()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().release()  # placed and cancelled in the same turn of the loop
            raise
        finally:
            self._drop(request.request_id)

    def reconfigure(self, live: LiveSettings) -> None:
        """Take over live settings; waiting requests are ordered anew under another policy."""
        reorder = (live.policy, live.ageing) != (self.live.policy, self.live.ageing)
        self.live = live
        if reorder:
            before = list(self._queue)
            self._queue = WaitingQueue(live.policy, live.ageing)
            for request, work_s in before:
                self._queue.add(request, work_s)
        self.wake()

    def wake(self) -> None:
        """Run a round soon; calls within one turn of the loop make one round."""
        if not self._round_due:
            self._round_due = True
            asyncio.get_running_loop().call_soon(self._round)

    def close(self) -> None:
        """Fail everything that still waits; nothing is placed afterwards."""
        self.closed = True
        for waiter in list(self._waiters.values()):
            self._fail(waiter, Unavailable("the proxy is shutting down; try another one"))
        if self._timer is not None:
            self._timer.cancel()

    def _round(self) -> None:
        self._round_due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiters or self.closed:
            return
        now_s = self.clock.now_s()
        pods = self.pods.candidates()
        self._fail_hopeless(pods, now_s)
        if pods:
            rules = self._rules()
            self._dispatch_aged(pods, rules, now_s)
            num_placed = 0
            for request in self._queue.first(HEADS_PER_ROUND, now_s):
                waiter = self._waiters[request.request_id]
                left = _preferred(pods, waiter.avoid)
                if not left:
                    continue  # it waits for a pod to come back, which is nothing to those behind it
                choice = choose(request, left, rules, now_s)
                if choice is None:
                    break  # what is behind the head would pass it
                self._dispatch(waiter, choice, now_s)
                num_placed += 1
            else:
                if self._waiters and num_placed:
                    self.wake()
        self._arm(pods, now_s)

    def _dispatch_aged(self, pods: list[Pod], rules: Rules, now_s: float) -> None:
        """Send the oldest aged request to a pod that holds none: the pod's scheduler gives it its share."""
        request = self._queue.oldest_aged(now_s)
        if request is None or rules.ageing is None:
            return
        factor = rules.ageing.factor

        def is_aged(held: Request) -> bool:
            return held.arrival_s + factor * held.ttft_slo_s < now_s

        waiter = self._waiters[request.request_id]
        left = _preferred(pods, waiter.avoid)
        free = [pod for pod in left if not any(is_aged(o.request) for o in pod.outstanding.values())]
        choice = choose_for_aged(request, free, rules)
        if choice is not None:
            self._dispatch(waiter, choice, now_s)

    def _fail_hopeless(self, pods: list[Pod], now_s: float) -> None:
        """Fail requests that found no pod for too long, and those to be shed whose slack has run out."""
        if not pods:
            if self._podless_since_s is None:
                self._podless_since_s = now_s
            for waiter in list(self._waiters.values()):
                if now_s >= max(self._podless_since_s, waiter.since_s) + self.pod_wait_s:
                    self._fail(
                        waiter, Unavailable(f"no pod was ready within {self.pod_wait_s} s; try again later")
                    )
            return
        self._podless_since_s = None
        if any(pod.suspect for pod in pods):
            for waiter in list(self._waiters.values()):
                over = now_s >= waiter.since_s + self.pod_wait_s
                if waiter.avoid and over and not _preferred(pods, waiter.avoid):
                    message = f"no pod came back within {self.pod_wait_s} s; try again later"
                    self._fail(waiter, Unavailable(message))
        rules = self._rules()
        while self._sheds and self._sheds[0][0] <= now_s:
            _, request_id = heapq.heappop(self._sheds)
            sheddable = self._waiters.get(request_id)
            if sheddable is None:
                continue
            best_s = best_case_s(sheddable.request, pods, rules)
            assert best_s is not None
            shed_at_s = sheddable.request.deadline_s - best_s
            if shed_at_s <= now_s:
                message = "no pod can meet this request's time to first token any more; it is shed"
                self._fail(sheddable, Shed(message))
            else:
                heapq.heappush(self._sheds, (shed_at_s, request_id))

    def _arm(self, pods: list[Pod], now_s: float) -> None:
        """Set the timer for the next moment at which time alone changes what a round would do."""
        if not self._waiters:
            return
        moments: list[float | None] = [self._queue.next_ageing_s]
        if self._sheds:
            moments.append(self._sheds[0][0])
        if not pods:
            moments.append(min(w.since_s for w in self._waiters.values()) + self.pod_wait_s)
            moments.append((self._podless_since_s or now_s) + self.pod_wait_s)
        if any(pod.suspect for pod in pods):
            moments += [w.since_s + self.pod_wait_s for w in self._waiters.values() if w.avoid]
            moments.append(self.pods.next_trust_s(now_s))
        for pod in pods:
            if pod.state is not None:
                moments += [o.dispatched_s + SETTLE_S for o in pod.outstanding.values()]
                if pod.state.running is not None:
                    moments.append(pod.state_at_s + pod.state.running.remaining_s - SOON_S)
        later = [moment for moment in moments if moment is not None and moment > now_s]
        if later:
            delay_s = min(later) - now_s + TIMER_SLACK_S
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._round)

    def _dispatch(self, waiter: _Waiter, choice: Choice, now_s: float) -> None:
        request = waiter.request
        pod = next(p for p in self.pods.candidates() if p.name == choice.pod)
        self._alone[pod.name] = None if pod.outstanding else request.request_id
        pod.outstanding[request.request_id] = Outstanding(
            request=request,
            num_tokens=choice.num_new_tokens,
            predicted_s=choice.work_s,
            dispatched_s=now_s,
        )

        def released(answered: bool) -> None:
            pod.outstanding.pop(request.request_id, None)
            if answered and self._alone.get(pod.name) == request.request_id:
                self._learned.observe(choice.num_new_tokens, self.clock.now_s() - now_s)
            if not pod.outstanding:
                self._alone.pop(pod.name, None)
            self.wake()

        placement = Placement(
            request=request,
            first=self.pods.endpoint(pod.name),
            choice=choice,
            decode=None,
            dispatched_s=now_s,
            _on_release=released,
        )
        placement.hold_decode(self.pods.pick_decode(pod.revision), waiter.num_sequences)
        self._drop(request.request_id)
        if waiter.future.done():
            placement.release()
        else:
            waiter.future.set_result(placement)

    def _fail(self, waiter: _Waiter, error: Exception) -> None:
        self._drop(waiter.request.request_id)
        if not waiter.future.done():
            waiter.future.set_exception(error)

    def _drop(self, request_id: str) -> None:
        self._waiters.pop(request_id, None)
        self._queue.discard(request_id)

    def _rules(self) -> Rules:
        live = self.live
        return Rules(
            policy=live.policy,
            batch_token_budget=live.batch_token_budget,
            preemption=live.preemption,
            max_suspended=live.max_suspended,
            num_proxies=self.pods.num_proxies,
            ageing=live.ageing,
            coefficients=self.pods.coefficients() or self._learned.coefficients,
        )


def _preferred(pods: list[Pod], avoid: frozenset[str]) -> list[Pod]:
    """Pods without the suspect ones and those to avoid, unless nothing else is left.

    None that is both: there this request has failed already, and nothing says that the pod is back.
    """
    for keep in (
        [p for p in pods if not p.suspect and p.name not in avoid],
        [p for p in pods if p.name not in avoid],
    ):
        if keep:
            return keep
    return [p for p in pods if not p.suspect]
