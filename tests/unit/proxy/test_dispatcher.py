"""The dispatcher on virtual time, over pods that are plain values."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowprefill.errors import QueueFull, Shed, Unavailable
from flowprefill.proxy.dispatcher import Dispatcher, Placement
from flowprefill.proxy.placement import Pod
from flowprefill.proxy.pods import DecodePod
from flowprefill.proxy.settings import LiveSettings
from flowprefill.proxy.slo import SloClass, SloClasses
from flowprefill.request import Request
from flowprefill.scheduling.settings import Ageing
from flowprefill.wire import Endpoint, PodState, TaskState
from support.virtual_time import LoopClock, run

CLASSES = SloClasses(
    classes={"c": SloClass(name="c", ttft_s=1.0, min_ttft_s=0.1, max_ttft_s=10.0)},
    default="c",
    service_tiers={},
)
LIVE = LiveSettings(
    generation=1, classes=CLASSES, policy="s-edf", batch_token_budget=1000, preemption="none", ageing=None
)
NETWORK_S = 0.001
PER_TOKEN = (0.0, 0.001, 0.0, 0.0)


def endpoint(name: str, role: str) -> Endpoint:
    return Endpoint(name=name, role=role, revision="r1", address="h:1", admin="h:2")


@dataclass
class Pods:
    """What the dispatcher asks of a pod table."""

    pods: list[Pod] = field(default_factory=list)
    decode: list[DecodePod] = field(default_factory=lambda: [DecodePod(endpoint=endpoint("d0", "decode"))])
    num_proxies: int = 1
    trust_s: float | None = None

    def next_trust_s(self, now_s: float) -> float | None:
        return self.trust_s

    def candidates(self) -> list[Pod]:
        return list(self.pods)

    def coefficients(self) -> tuple[float, float, float, float] | None:
        return PER_TOKEN

    def endpoint(self, name: str) -> Endpoint:
        return endpoint(name, "prefill")

    def pick_decode(self, revision: str, avoid: frozenset[str] = frozenset()) -> DecodePod | None:
        return min(self.decode, key=lambda pod: pod.num_sequences, default=None)


class SimulatedPod:
    """Runs what it is sent one by one in arrival order, and reports its state at every change."""

    def __init__(self, name: str, dispatcher: Dispatcher, pod: Pod) -> None:
        self.pod, self.dispatcher = pod, dispatcher
        self.queue: list[Placement] = []
        self.log: list[tuple[str, float]] = []
        self.busy = False

    def take(self, placement: Placement) -> None:
        self.queue.append(placement)
        if not self.busy:
            self._next()
        else:
            self._report(None)

    def _next(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self.busy = bool(self.queue)
        if not self.busy:
            self._report(PodState(sequence=1, role="prefill", revision="r1", ready=True))
            return
        placement = self.queue.pop(0)
        request = placement.request
        self.log.append((request.request_id, now_s))
        self._running = (request, now_s)
        self._report(None)
        work_s = 0.001 * placement.choice.num_new_tokens
        asyncio.get_running_loop().call_later(work_s, self._done, placement)

    def _done(self, placement: Placement) -> None:
        placement.release()
        self._next()

    def _report(self, state: PodState | None) -> None:
        now_s = asyncio.get_running_loop().time()
        if state is None:
            request, began_s = self._running
            left_s = 0.001 * request.num_prompt_tokens - (now_s - began_s)
            task = TaskState(
                num_tokens=request.num_prompt_tokens,
                remaining_s=left_s,
                deadline_in_s=request.deadline_s - now_s,
                feasible=request.deadline_s - now_s > left_s,
            )
            waiting = sum(p.choice.num_new_tokens for p in self.queue)
            state = PodState(
                sequence=1,
                role="prefill",
                revision="r1",
                ready=True,
                running=task,
                waiting=len(self.queue),
                waiting_s=0.001 * waiting,
                waiting_tokens=waiting,
            )
        asyncio.get_running_loop().call_later(NETWORK_S, self._arrives, state)

    def _arrives(self, state: PodState) -> None:
        self.pod.state, self.pod.state_at_s = state, asyncio.get_running_loop().time()
        self.dispatcher.wake()


def idle_pod(name: str = "p0") -> Pod:
    state = PodState(sequence=1, role="prefill", revision="r1", ready=True)
    return Pod(name=name, revision="r1", state=state, coefficients=PER_TOKEN)


def dispatcher(pods: Pods, live: LiveSettings = LIVE, **options: object) -> Dispatcher:
    defaults = {"queue_limit": 100, "pod_wait_s": 5.0}
    return Dispatcher(clock=LoopClock(), pods=pods, live=live, **{**defaults, **options})


def request(name: str, tokens: int = 100, slo_s: float = 1.0, **fields: object) -> Request:
    now_s = asyncio.get_running_loop().time()
    defaults = {"arrival_s": now_s, "deadline_s": now_s + slo_s, "ttft_slo_s": slo_s}
    return Request(request_id=name, num_prompt_tokens=tokens, **{**defaults, **fields})


def test_requests_leave_in_policy_order_as_the_pod_becomes_free():
    async def main() -> list[str]:
        pods = Pods(pods=[idle_pod()])
        queue = dispatcher(pods)
        simulated = SimulatedPod("p0", queue, pods.pods[0])

        async def one(name: str, slo_s: float) -> None:
            simulated.take(await queue.place(request(name, tokens=900, slo_s=slo_s)))

        async with asyncio.TaskGroup() as group:
            for name, slo_s in (("late", 60.0), ("first", 10.0), ("mid", 30.0), ("soon", 20.0)):
                group.create_task(one(name, slo_s))
        await asyncio.sleep(10)
        assert queue.num_waiting == 0
        assert not pods.pods[0].outstanding
        return [name for name, _ in simulated.log]

    assert run(main()) == ["first", "soon", "mid", "late"]


def test_a_request_that_arrives_later_and_is_more_urgent_overtakes_those_still_at_the_proxy():
    async def main() -> list[str]:
        pods = Pods(pods=[idle_pod()])
        queue = dispatcher(pods)
        simulated = SimulatedPod("p0", queue, pods.pods[0])

        async def one(name: str, slo_s: float, after_s: float) -> None:
            await asyncio.sleep(after_s)
            simulated.take(await queue.place(request(name, tokens=900, slo_s=slo_s)))

        async with asyncio.TaskGroup() as group:
            for index in range(4):
                group.create_task(one(f"doc{index}", 60.0, 0.001 * index))
            group.create_task(one("urgent", 3.0, 0.5))
        await asyncio.sleep(10)
        return [name for name, _ in simulated.log]

    # doc0 runs and doc1 was sent ahead before `urgent` came; the rest was still here
    assert run(main()) == ["doc0", "doc1", "urgent", "doc2", "doc3"]


def test_nothing_passes_the_head_of_the_queue_even_where_it_would_fit():
    async def main() -> list[str]:
        pods = Pods(pods=[idle_pod()])
        queue = dispatcher(pods)
        simulated = SimulatedPod("p0", queue, pods.pods[0])

        async def one(name: str, tokens: int, slo_s: float) -> None:
            simulated.take(await queue.place(request(name, tokens=tokens, slo_s=slo_s)))

        async with asyncio.TaskGroup() as group:
            for name, tokens, slo_s in (
                ("runs", 2000, 5.0),
                ("ahead", 600, 10.0),
                ("does not fit", 900, 20.0),
                ("would fit", 100, 30.0),
            ):
                group.create_task(one(name, tokens, slo_s))
        await asyncio.sleep(10)
        return [name for name, _ in simulated.log]

    assert run(main()) == ["runs", "ahead", "does not fit", "would fit"]


def test_many_requests_that_fit_are_placed_over_several_rounds():
    async def main() -> int:
        pods = Pods(pods=[idle_pod(f"p{i}") for i in range(40)])
        queue = dispatcher(pods)
        places = await asyncio.gather(*(queue.place(request(f"r{i}")) for i in range(40)))
        return len({place.first.name for place in places})

    assert run(main()) == 40


def test_a_full_queue_refuses_and_a_place_in_it_comes_back():
    async def main() -> None:
        queue = dispatcher(Pods(), queue_limit=2)
        waiting = [asyncio.create_task(queue.place(request(f"w{i}"))) for i in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="2 requests wait already"):
            await queue.place(request("one too many"))
        waiting[0].cancel()
        await asyncio.gather(waiting[0], return_exceptions=True)
        assert queue.num_waiting == 1
        again = asyncio.create_task(queue.place(request("again")))
        await asyncio.sleep(0)
        assert queue.num_waiting == 2
        queue.close()
        results = await asyncio.gather(*waiting, again, return_exceptions=True)
        assert sum(isinstance(r, Unavailable) for r in results) == 2

    run(main())


def test_without_a_pod_a_request_waits_a_bounded_time():
    async def main() -> float:
        queue = dispatcher(Pods(), pod_wait_s=5.0)
        await asyncio.sleep(3.0)
        with pytest.raises(Unavailable, match="no pod was ready"):
            await queue.place(request("r"))
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(8.0, abs=0.01)


def test_a_pod_that_appears_in_time_serves_the_request():
    async def main() -> float:
        pods = Pods()
        queue = dispatcher(pods, pod_wait_s=5.0)
        waiting = asyncio.create_task(queue.place(request("r")))
        await asyncio.sleep(4.0)
        pods.pods.append(idle_pod())
        queue.wake()
        (await waiting).release()
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(4.0)


def test_a_class_that_sheds_is_told_at_once_when_no_pod_can_make_it():
    async def main() -> float:
        queue = dispatcher(Pods(pods=[idle_pod()]))
        with pytest.raises(Shed):
            await queue.place(request("r", tokens=2000, slo_s=1.5, shed_when_infeasible=True))
        return asyncio.get_running_loop().time()

    assert run(main()) == 0.0


def test_a_class_that_sheds_is_told_when_its_slack_runs_out_in_the_queue():
    async def main() -> float:
        pods = Pods(pods=[idle_pod()])
        queue = dispatcher(pods)
        held = await queue.place(request("running", tokens=5000, slo_s=0.5))
        patient = asyncio.create_task(queue.place(request("patient", tokens=2000, slo_s=2.5)))
        with pytest.raises(Shed):
            await queue.place(request("shed", tokens=1200, slo_s=2.0, shed_when_infeasible=True))
        shed_s = asyncio.get_running_loop().time()
        held.release()
        (await patient).release()
        return shed_s

    assert run(main()) == pytest.approx(0.8, abs=0.01)  # 2.0 s minus 1.2 s of work


def test_a_retry_goes_to_another_pod_when_there_is_one():
    async def main() -> list[str]:
        pods = Pods(pods=[idle_pod("p0"), idle_pod("p1")])
        queue = dispatcher(pods)
        names = []
        for avoid in (frozenset({"p0"}), frozenset({"p1"}), frozenset({"p0", "p1"})):
            placement = await queue.place(request("r"), avoid=avoid)
            names.append(placement.first.name)
            placement.release()
        return names

    assert run(main()) == ["p1", "p0", "p0"]


def test_a_retry_waits_until_the_only_pod_is_trusted_again():
    async def main() -> float:
        pods = Pods(pods=[idle_pod("p0")], trust_s=1.0)
        pods.pods[0].suspect = True
        queue = dispatcher(pods)
        retry = asyncio.create_task(queue.place(request("r"), avoid=frozenset({"p0"})))
        await asyncio.sleep(0.9)
        assert not retry.done()
        pods.pods[0].suspect = False  # nobody says so: it is a matter of time
        (await retry).release()
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(1.0, abs=0.01)


def test_a_retry_that_only_a_dead_pod_is_left_to_fails_after_the_wait_for_pods():
    async def main() -> float:
        pods = Pods(pods=[idle_pod("p0")])
        pods.pods[0].suspect = True
        queue = dispatcher(pods, pod_wait_s=5.0)
        with pytest.raises(Unavailable, match="no pod came back"):
            await queue.place(request("r"), avoid=frozenset({"p0"}))
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(5.0, abs=0.01)


def test_a_retry_that_waits_for_a_dead_pod_holds_nobody_up():
    async def main() -> list[str]:
        pods = Pods(pods=[idle_pod("p0")])
        pods.pods[0].suspect = True
        queue = dispatcher(pods)
        retry = asyncio.create_task(queue.place(request("urgent", slo_s=0.1), avoid=frozenset({"p0"})))
        await asyncio.sleep(0.01)
        placement = await queue.place(request("patient", slo_s=9.0))
        retry.cancel()
        await asyncio.gather(retry, return_exceptions=True)
        return [placement.request.request_id]

    assert run(main()) == ["patient"]


@pytest.mark.parametrize(("ageing", "served"), [(Ageing(factor=4.0), True), (None, False)])
def test_a_batch_request_under_a_stream_of_urgent_ones_is_served_by_ageing(ageing, served):
    """300 ms promises at 1.25 times what the pod can do, and one batch request with 5 s."""

    async def main() -> float | None:
        pods = Pods(pods=[idle_pod()])
        queue = dispatcher(pods, replace(LIVE, ageing=ageing), queue_limit=10_000)
        simulated = SimulatedPod("p0", queue, pods.pods[0])
        began_s: list[float] = []
        tasks = []

        async def one(name: str, tokens: int, slo_s: float) -> None:
            placement = await queue.place(request(name, tokens=tokens, slo_s=slo_s))
            if name == "batch":
                began_s.append(asyncio.get_running_loop().time())
            simulated.take(placement)

        tasks.append(asyncio.create_task(one("batch", 5000, 5.0)))
        tasks.append(asyncio.create_task(one("u", 90, 0.3)))
        for index in range(500):
            tasks.append(asyncio.create_task(one(f"u{index}", 100, 0.3)))
            await asyncio.sleep(0.08)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return began_s[0] if began_s else None

    served_s = run(main())
    if served:
        # It ages at 4 times its 5 s. The pod then still holds up to one window (1 s of work) and one urgent
        # request that aged before it.
        assert 20.0 <= served_s <= 20.0 + 1.0 + 2 * 0.1
    else:
        assert served_s is None


def test_a_policy_change_orders_the_waiting_anew():
    async def main() -> str:
        pods = Pods(pods=[])
        queue = dispatcher(pods)
        tasks = {
            name: asyncio.create_task(queue.place(request(name, tokens=2000, slo_s=slo_s)))
            for name, slo_s in (("came first", 50.0), ("due first", 20.0))
        }
        await asyncio.sleep(1)
        queue.reconfigure(replace(LIVE, policy="fcfs"))
        pods.pods.append(idle_pod())
        queue.wake()
        done, _ = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
        queue.close()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        return next(name for name, task in tasks.items() if task in done)

    assert run(main()) == "came first"


def test_a_place_given_in_the_same_turn_as_the_cancellation_is_not_lost():
    async def main() -> None:
        pods = Pods(pods=[idle_pod()])
        queue = dispatcher(pods)
        task = asyncio.create_task(queue.place(request("r")))
        await asyncio.sleep(0)  # it waits now, and its round is due
        asyncio.get_running_loop().call_soon(task.cancel)  # right behind the round
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert not pods.pods[0].outstanding
        assert pods.decode[0].num_sequences == 0

    run(main())


def test_the_speed_of_pods_that_report_none_is_learned_from_legs_that_had_a_pod_to_themselves():
    async def main() -> list[float]:
        pods = Pods(pods=[Pod(name="stock", revision="r1")])
        pods.coefficients = lambda: None
        queue = dispatcher(pods)
        seen = []
        for index in range(6):
            placement = await queue.place(request(f"r{index}", tokens=500))
            seen.append(placement.choice.work_s)
            if index == 0:  # another one comes in between: this leg's time says nothing
                other = await queue.place(request("other", tokens=100))
                await asyncio.sleep(30)
                other.release_first(answered=True)
            await asyncio.sleep(1.0)
            placement.release_first(answered=True)
        seen.append((await queue.place(request("last", tokens=500))).choice.work_s)
        return seen

    first, *_, last = run(main())
    assert first == pytest.approx(0.005 + 500e-4)  # the guess
    assert last == pytest.approx(1.0)  # as long as the five legs before it took


steps = st.lists(
    st.tuples(
        st.sampled_from(["place", "cancel", "release", "release_again", "first", "vanish", "appear", "wait"]),
        st.integers(0, 7),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(steps)
def test_whatever_happens_everything_held_is_given_back_exactly_once(script):
    async def main() -> None:
        pods = Pods(pods=[idle_pod("p0"), idle_pod("p1")])
        all_pods = list(pods.pods)
        queue = dispatcher(pods, queue_limit=6)
        tasks: list[asyncio.Task[Placement]] = []

        def placements() -> list[Placement]:
            ok = [t for t in tasks if t.done() and not t.cancelled() and t.exception() is None]
            return [t.result() for t in ok]

        for count, (step, which) in enumerate(script):
            if step == "place":
                tasks.append(
                    asyncio.create_task(
                        queue.place(request(f"r{count}", tokens=300), num_sequences=1 + which % 3)
                    )
                )
            elif step == "cancel" and tasks:
                tasks[which % len(tasks)].cancel()
            elif step in ("release", "release_again", "first") and placements():
                placement = placements()[which % len(placements())]
                placement.release_first()
                if step != "first":
                    placement.release()
                if step == "release_again":
                    placement.release()
            elif step == "vanish" and pods.pods:
                pods.pods.pop()
                queue.wake()
            elif step == "appear" and len(pods.pods) < 2:
                pods.pods = list(all_pods)
                queue.wake()
            await asyncio.sleep(0.01 + which)
            held = [p for p in placements() if p._holds_first]
            assert sum(len(p.outstanding) for p in all_pods) == len(held)
            assert pods.decode[0].num_sequences >= 0
        queue.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        for placement in placements():
            placement.release()
        assert [len(p.outstanding) for p in all_pods] == [0, 0]
        assert pods.decode[0].num_sequences == 0
        assert queue.num_waiting == 0
        assert all(t.done() for t in tasks)

    run(main())
