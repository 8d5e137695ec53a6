"""Late binding: which prefill pod, if any, a waiting request should go to now. Pure.

A request leaves the proxy for a pod that would run it at once: the pod is idle, or the request would preempt what
runs there. Beyond that a pod is sent at most one batch budget of new tokens that go before the request, so that
the next batch is in place when the running one ends. Several proxies each keep their share of that window. Pods
that report no state (stock vLLM) get the least outstanding predicted work, up to two batch budgets.

What a pod has started is only known from its last state line, so work that was sent after that line counts as
waiting there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from flowprefill.request import Request
from flowprefill.scheduling.policy import POLICIES
from flowprefill.scheduling.settings import Ageing, PolicyName, Preemption
from flowprefill.scheduling.state import Job
from flowprefill.wire import PodState

Coefficients = tuple[float, float, float, float]

SETTLE_S = 0.05
"""A state line is not trusted about a request sent less than this ago: it may have been written before."""

SOON_S = 0.02
"""A pod whose running work ends this soon gets the next prompt, of any length, so that it does not idle."""

UNTRAINED: Coefficients = (0.005, 1e-4, 0.0, 0.0)
"""A guess of prefill time for pods that report no prediction, until they have been measured."""

Kind = Literal["idle", "preempt", "ahead", "stateless", "aged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outstanding:
    """One request of ours at a pod, from dispatch to the leg's answer. `num_tokens` is net of cached prefix."""

    request: Request
    num_tokens: int
    predicted_s: float
    dispatched_s: float


@dataclass(slots=True, kw_only=True)
class Pod:
    """What the proxy knows of one prefill (or colocated) pod. `rank` 0 is the newest usable revision.

    `state` is None without a live state stream; `state_at_s` is when it came, on the proxy's clock.
    `suspect` pods failed lately: they are taken only when no other pod is left. A `leaving` pod is terminating and here
    because there is no other one: it is taken although it says that it drains.
    """

    name: str
    revision: str
    rank: int = 0
    state: PodState | None = None
    state_at_s: float = 0.0
    cached: frozenset[int] = frozenset()
    outstanding: dict[str, Outstanding] = field(default_factory=dict)
    coefficients: Coefficients | None = None
    suspect: bool = False
    leaving: bool = False

    @property
    def takes(self) -> bool:
        """Whether it takes new requests, for all that its last state line says."""
        return self.state is None or self.leaving or (self.state.ready and not self.state.draining)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The live settings that placement reads. `coefficients` predict for pods that report none."""

    policy: PolicyName
    batch_token_budget: int
    preemption: Preemption
    max_suspended: int
    num_proxies: int = 1
    ageing: Ageing | None = None
    coefficients: Coefficients = UNTRAINED

    @property
    def window_tokens(self) -> int:
        """New tokens of this proxy that may wait at one pod ahead of a request."""
        return max(self.batch_token_budget // self.num_proxies, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A pod for a request. `start_s` and `work_s` are predicted seconds until it runs and of running."""

    pod: str
    kind: Kind
    num_new_tokens: int
    start_s: float
    work_s: float


def predict_s(coefficients: Coefficients, num_new: int, num_cached: int) -> float:
    """Predicted prefill time in seconds: `a + b n + c n^2 + d n p`, never negative."""
    a, b, c, d = coefficients
    return max(a + num_new * (b + c * num_new + d * num_cached), 0.0) if num_new else 0.0


def num_cached_tokens(request: Request, pod: Pod) -> int:
    """Prompt tokens whose KV the pod likely holds: whole leading blocks, always leaving a token to compute."""
    if not pod.cached or pod.state is None:
        return 0
    blocks = 0
    for prefix_hash in request.prefix_hashes:
        if prefix_hash not in pod.cached:
            break
        blocks += 1
    size = pod.state.block_size
    return min(blocks, (request.num_prompt_tokens - 1) // size) * size


def best_case_s(request: Request, pods: Iterable[Pod], rules: Rules) -> float | None:
    """Predicted seconds on the pod that would be fastest if it did nothing else; None without pods."""
    return min((_work(request, pod, rules)[1] for pod in pods), default=None)


def choose(request: Request, pods: Iterable[Pod], rules: Rules, now_s: float) -> Choice | None:
    """The pod to send `request` to now, or None when it should keep waiting at the proxy.

    Among pods that would take it: those that meet its deadline first, then the newest revision, then the least
    delay caused in all (its own, and what it inflicts on a task that it preempts).
    """
    fits = []
    for pod in pods:
        fit = _fit(request, pod, rules, now_s)
        if fit is not None:
            late = now_s + fit.start_s + fit.work_s > request.deadline_s
            inflicted_s = fit.work_s if fit.kind == "preempt" else 0.0
            load_s = sum(o.predicted_s for o in pod.outstanding.values())
            fits.append(((late, pod.rank, fit.start_s + fit.work_s + inflicted_s, load_s, pod.name), fit))
    return min(fits, key=lambda pair: pair[0])[1] if fits else None


def choose_for_aged(request: Request, pods: Iterable[Pod], rules: Rules) -> Choice | None:
    """The pod with the least outstanding work for a request that has waited too long to wait for its turn."""
    taking = [pod for pod in pods if pod.takes]
    if not taking:
        return None
    pod = min(taking, key=lambda p: (sum(o.predicted_s for o in p.outstanding.values()), p.rank, p.name))
    new, work_s = _work(request, pod, rules)
    start_s = sum(o.predicted_s for o in pod.outstanding.values())
    return Choice(pod=pod.name, kind="aged", num_new_tokens=new, start_s=start_s, work_s=work_s)


def _work(request: Request, pod: Pod, rules: Rules) -> tuple[int, float]:
    cached = num_cached_tokens(request, pod)
    new = request.num_prompt_tokens - cached
    return new, predict_s(pod.coefficients or rules.coefficients, new, cached)


def _fit(request: Request, pod: Pod, rules: Rules, now_s: float) -> Choice | None:
    new, work_s = _work(request, pod, rules)
    state = pod.state
    if state is None:
        return _fit_stateless(pod, rules, new, work_s)
    if not pod.takes:
        return None

    def fit(kind: Kind, start_s: float) -> Choice:
        return Choice(pod=pod.name, kind=kind, num_new_tokens=new, start_s=start_s, work_s=work_s)

    unseen = [o for o in pod.outstanding.values() if _is_unseen(o, pod, now_s)]
    if state.running is None and not state.suspended and not state.waiting and not unseen:
        return fit("idle", 0.0)
    if state.kv_blocks and -(-new // state.block_size) > state.kv_blocks_free:
        return None

    seen = [o for o in pod.outstanding.values() if o not in unseen]
    before, outranks_running = _compare(request, work_s, pod, rules, now_s)
    left_s = _running_left_s(pod, now_s)
    if state.running is None:  # then what was sent last, and goes behind this request, is about to run
        starting = [o for o in unseen if o not in before]
        outranks_running = bool(starting)
        left_s = max((o.predicted_s - (now_s - o.dispatched_s) for o in starting), default=0.0)

    num_waiting = _num_waiting_tokens(pod, seen)
    first_in_line = not num_waiting or not any(o in before for o in seen)
    first_in_line = first_in_line and not any(o in before for o in unseen)
    can_preempt = rules.preemption != "none" and len(state.suspended) < rules.max_suspended
    if first_in_line and outranks_running and can_preempt:
        return fit("preempt", 0.0)

    start_s = max(left_s, 0.0)
    start_s += min(state.waiting_s, sum(o.predicted_s for o in before if o in seen))
    start_s += sum(o.predicted_s for o in before if o in unseen)
    num_ahead = num_waiting + sum(o.num_tokens for o in unseen)
    if num_ahead + new <= rules.window_tokens or (not num_ahead and start_s <= SOON_S):
        return fit("ahead", start_s)
    return None


def _fit_stateless(pod: Pod, rules: Rules, new: int, work_s: float) -> Choice | None:
    held = sum(o.num_tokens for o in pod.outstanding.values())
    if held and held + new > 2 * rules.window_tokens:
        return None
    start_s = sum(o.predicted_s for o in pod.outstanding.values())
    return Choice(pod=pod.name, kind="stateless", num_new_tokens=new, start_s=start_s, work_s=work_s)


def _is_unseen(outstanding: Outstanding, pod: Pod, now_s: float) -> bool:
    """Whether the last state line may have been written before the pod saw this request."""
    sent_s = outstanding.dispatched_s
    return pod.state_at_s <= sent_s or now_s < sent_s + SETTLE_S


def _num_waiting_tokens(pod: Pod, seen: Sequence[Outstanding]) -> int:
    """New tokens of ours that the pod has seen and not started; other proxies' count at most as ours."""
    assert pod.state is not None
    ours = sum(o.num_tokens for o in seen)
    if pod.state.waiting_tokens is not None:
        return min(pod.state.waiting_tokens, ours)
    tasks = (pod.state.running, *pod.state.suspended)
    return max(ours - sum(task.num_tokens for task in tasks if task is not None), 0)


def _compare(
    request: Request, work_s: float, pod: Pod, rules: Rules, now_s: float
) -> tuple[list[Outstanding], bool]:
    """Requests of ours at the pod that go before this one under the policy, and whether it outranks what runs."""
    held = list(pod.outstanding.values())
    jobs = [
        _job(request, work_s, len(held)),
        *(_job(o.request, o.predicted_s, i) for i, o in enumerate(held)),
    ]
    running = pod.state.running if pod.state is not None else None
    if running is not None:
        jobs.append(
            Job(
                job_id="",
                sequence=-1,
                arrival_s=float("-inf"),
                deadline_s=pod.state_at_s + running.deadline_in_s,
                remaining_s=_running_left_s(pod, now_s),
            )
        )
    ours, *others = POLICIES[rules.policy].ranks(jobs, now_s)
    before = [o for o, rank in zip(held, others, strict=False) if rank < ours]
    return before, running is not None and ours < others[-1]


def _job(request: Request, work_s: float, sequence: int) -> Job:
    return Job(
        job_id=request.request_id,
        sequence=sequence,
        arrival_s=request.arrival_s,
        deadline_s=request.deadline_s,
        remaining_s=work_s,
        weight=request.weight,
    )


def _running_left_s(pod: Pod, now_s: float) -> float:
    if pod.state is None or pod.state.running is None:
        return 0.0
    return max(pod.state.running.remaining_s - (now_s - pod.state_at_s), 0.0)
