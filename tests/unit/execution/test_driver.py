"""The driver: bounded inbox, one outcome per request, results, and what happens when something breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from flowprefill.engines.protocol import PrefillItem
from flowprefill.errors import QueueFull, Unavailable
from flowprefill.execution.driver import SchedulerDriver
from flowprefill.execution.listener import SilentListener
from flowprefill.execution.pool import ExecutionPool
from flowprefill.execution.results import Finished, FinishedPrefill
from flowprefill.execution.virtual_clock import VirtualClock
from flowprefill.request import Request
from flowprefill.scheduling.actions import Action, Outcome, Task
from flowprefill.scheduling.events import Event
from flowprefill.scheduling.kv import KVCachePool
from flowprefill.scheduling.predictor import Predictor
from flowprefill.scheduling.scheduler import Scheduler
from flowprefill.scheduling.settings import SchedulerSettings
from flowprefill.scheduling.snapshot import SchedulerSnapshot
from support.ladder import LadderEngine


class Heard(SilentListener):
    """Remembers what it hears; `on_finished` is called after each outcome."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.outcomes: list[tuple[float, str, Outcome, str]] = []
        self.results: dict[str, Finished] = {}
        self.crashes: list[BaseException] = []
        self.states: list[SchedulerSnapshot] = []
        self.raises = False

    def on_finish(self, request_id: str, outcome: Outcome, reason: str, result: Finished | None) -> None:
        self.outcomes.append((self._clock.now_s(), request_id, outcome, reason))
        if result is not None:
            self.results[request_id] = result
        if self.raises:
            raise RuntimeError("the listener broke")

    def on_events(self, event: Event, actions: Sequence[Action], now_s: float) -> None:
        if self.raises:
            raise RuntimeError("the listener broke")

    def on_state(self, snapshot: SchedulerSnapshot) -> None:
        self.states.append(snapshot)

    def on_crash(self, error: BaseException) -> None:
        self.crashes.append(error)


class Rig:
    """A driver over a ladder engine (one second a token) on a virtual clock."""

    def __init__(self, settings: SchedulerSettings | None = None, *, inbox_limit: int = 100) -> None:
        self.clock = VirtualClock()
        self.engine = LadderEngine(self.clock)
        self.heard = Heard(self.clock)
        self.payload_errors: set[str] = set()
        self.scheduler = Scheduler(
            settings or SchedulerSettings(ageing=None, batch_token_budget=1),
            KVCachePool(100, 1),
            Predictor((0.0, 1.0, 0.0, 0.0)),
        )
        self.pool = ExecutionPool(self.engine, self.clock)
        self.driver = SchedulerDriver(
            self.scheduler, self.pool, self.clock, self._payload, self.heard, inbox_limit=inbox_limit
        )

    def _payload(self, task: Task) -> list[PrefillItem]:
        for item in task.items:
            if item.request_id in self.payload_errors:
                raise LookupError(f"no tokens of {item.request_id}")
        return [
            PrefillItem(
                request_id=item.request_id,
                token_ids=range(item.num_tokens),
                start=item.start,
                block_ids=item.block_ids,
                sample=item.completes,
            )
            for item in task.items
        ]

    def request(self, request_id: str, num_tokens: int, *, slo_s: float = 1000.0) -> Request:
        now_s = self.clock.now_s()
        return Request(
            request_id=request_id,
            num_prompt_tokens=num_tokens,
            arrival_s=now_s,
            deadline_s=now_s + slo_s,
            ttft_slo_s=slo_s,
        )

    def play(self, script: Callable[[Rig], None], *, close: bool = True) -> None:
        """Run the script as a thread beside the driver; then close the driver."""
        raised: list[BaseException] = []

        def main() -> None:
            self.driver.start()
            try:
                script(self)
            except BaseException as error:
                raised.append(error)

        thread = self.clock.start_thread(main, name="script", rank=1)
        thread.join(30)
        assert not thread.is_alive()
        if close:
            self.driver.close()
            assert self.pool.num_threads == 0
        if raised:
            raise raised[0]


def test_a_completed_request_comes_with_its_result() -> None:
    def script(rig: Rig) -> None:
        rig.driver.submit([rig.request("a", 5)])
        rig.clock.sleep_until_s(10)
        assert rig.heard.outcomes == [(5.0, "a", "completed", "")]
        result = rig.heard.results["a"]
        assert isinstance(result, FinishedPrefill)
        assert (result.token_id, result.num_tokens, result.num_cached_tokens, result.num_tasks) == (
            5,
            5,
            0,
            1,
        )
        assert len(result.block_ids) == 5
        assert rig.driver.num_outstanding == 0

    Rig().play(script)


def test_a_chunked_prompt_has_one_result_from_all_its_tasks() -> None:
    def script(rig: Rig) -> None:
        rig.driver.submit([rig.request("a", 7)])
        rig.clock.sleep_until_s(10)
        result = rig.heard.results["a"]
        assert isinstance(result, FinishedPrefill)
        assert (result.num_tokens, result.num_cached_tokens, result.num_tasks) == (7, 0, 3)

    Rig(SchedulerSettings(ageing=None, chunk_tokens=3)).play(script)


def test_an_urgent_request_preempts_and_both_complete() -> None:
    def script(rig: Rig) -> None:
        rig.driver.submit([rig.request("long", 20)])
        rig.clock.sleep_until_s(3.5)
        rig.driver.submit([rig.request("short", 2, slo_s=5.0)])
        rig.clock.sleep_until_s(40)
        assert [(when_s, who) for when_s, who, _, _ in rig.heard.outcomes] == [(6.0, "short"), (22.0, "long")]
        running = [state.running for state in rig.heard.states]
        assert any(len(state.suspended) == 1 for state in rig.heard.states)
        assert running[-1] is None

    Rig().play(script)


def test_a_full_inbox_refuses_all_of_a_burst_and_takes_it_once_there_is_room() -> None:
    def script(rig: Rig) -> None:
        rig.driver.submit([rig.request("a", 1), rig.request("b", 1)])  # the driver has not run yet
        with pytest.raises(QueueFull, match="holds 2 requests and 2 more do not fit; its limit is 3"):
            rig.driver.submit([rig.request("c", 1), rig.request("d", 1)])
        rig.driver.submit([rig.request("step", 1)], bounded=False)
        rig.driver.submit([])
        rig.clock.sleep_until_s(10)
        rig.driver.submit([rig.request("c", 1), rig.request("d", 1)])
        rig.clock.sleep_until_s(20)
        assert [who for _, who, _, _ in rig.heard.outcomes] == ["a", "b", "step", "c", "d"]

    Rig(inbox_limit=3).play(script)


def test_an_id_is_free_again_when_the_scheduler_knows_it_no_more() -> None:
    def script(rig: Rig) -> None:
        submit = rig.driver.submit
        with pytest.raises(ValueError, match=r"\['a'\] are given twice or in use"):
            submit([rig.request("a", 2), rig.request("a", 2)])
        submit([rig.request("a", 4)])
        with pytest.raises(ValueError, match="in use"):
            submit([rig.request("a", 4)])
        rig.clock.sleep_until_s(1.5)
        rig.driver.cancel("a")
        rig.clock.sleep_until_s(1.6)
        assert rig.heard.outcomes == [(1.5, "a", "cancelled", "")]
        with pytest.raises(ValueError, match="in use"):  # its task still runs to the next point
            submit([rig.request("a", 4)])
        rig.clock.sleep_until_s(3)
        submit([rig.request("a", 1)])
        rig.clock.sleep_until_s(5)
        with pytest.raises(ValueError, match="in use"):  # completed, and its blocks are held
            submit([rig.request("a", 1)])
        rig.driver.release(["a"])
        submit([rig.request("a", 1)])
        rig.clock.sleep_until_s(9)
        assert [outcome for _, _, outcome, _ in rig.heard.outcomes] == ["cancelled", "completed", "completed"]

    Rig().play(script)


def test_an_engine_error_fails_its_request_and_the_next_one_runs() -> None:
    def script(rig: Rig) -> None:
        rig.engine.fail_at["bad"] = 1
        rig.driver.submit([rig.request("bad", 3)])
        rig.clock.sleep_until_s(5)
        rig.driver.submit([rig.request("good", 3)])
        rig.clock.sleep_until_s(10)
        reason = "the engine failed in a batch of 1: RuntimeError: bad broke at 1"
        assert rig.heard.outcomes == [(1.0, "bad", "failed", reason), (8.0, "good", "completed", "")]

    Rig().play(script)


def test_a_batch_that_cannot_be_put_together_fails_like_one_the_engine_refused() -> None:
    def script(rig: Rig) -> None:
        rig.payload_errors.add("bad")
        rig.driver.submit([rig.request("bad", 3), rig.request("good", 3)])
        rig.clock.sleep_until_s(10)
        reason = "the batch could not be put together: LookupError: no tokens of bad"
        assert rig.heard.outcomes == [(0.0, "bad", "failed", reason), (3.0, "good", "completed", "")]

    Rig().play(script)


def test_a_listener_that_raises_stops_nobody() -> None:
    def script(rig: Rig) -> None:
        rig.heard.raises = True
        rig.driver.submit([rig.request("a", 1)])
        rig.clock.sleep_until_s(5)
        rig.driver.submit([rig.request("b", 1)])
        rig.clock.sleep_until_s(9)
        assert [who for _, who, _, _ in rig.heard.outcomes] == ["a", "b"]
        assert rig.heard.crashes == []

    Rig().play(script)


def test_an_error_inside_the_scheduler_fails_every_request_and_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def script(rig: Rig) -> None:
        rig.driver.submit([rig.request("running", 9), rig.request("waiting", 9)])
        rig.clock.sleep_until_s(2)

        def breaks(event: Event, now_s: float) -> tuple[Action, ...]:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(rig.scheduler, "handle", breaks)
        rig.driver.submit([rig.request("late", 1)])
        rig.clock.sleep_until_s(20)
        assert [(who, outcome) for _, who, outcome, _ in rig.heard.outcomes] == [
            ("late", "failed"),
            ("running", "failed"),
            ("waiting", "failed"),
        ]
        assert all("internal error" in reason for _, _, _, reason in rig.heard.outcomes)
        assert [str(error) for error in rig.heard.crashes] == ["a bug"]
        assert isinstance(rig.driver.crashed, ZeroDivisionError)
        with pytest.raises(Unavailable, match="must be restarted"):
            rig.driver.submit([rig.request("later", 1)])
        assert rig.engine.unwound == ["running"]

    Rig().play(script)


def test_an_error_of_the_pool_is_the_schedulers_end_too() -> None:
    def script(rig: Rig) -> None:
        rig.driver.submit([rig.request("a", 9)])
        rig.clock.sleep_until_s(2)
        rig.pool._broken(RuntimeError("a thread broke"))
        rig.clock.sleep_until_s(20)
        assert [(who, outcome) for _, who, outcome, _ in rig.heard.outcomes] == [("a", "failed")]
        assert [str(error) for error in rig.heard.crashes] == ["a thread broke"]

    Rig().play(script)


def test_closing_ends_what_is_outstanding_and_takes_nothing_more() -> None:
    rig = Rig()

    def script(rig: Rig) -> None:
        rig.driver.submit([rig.request("a", 1_000_000), rig.request("b", 5)])
        rig.clock.sleep_until_s(2)
        rig.driver._inbox.close("stopping")  # what `close` does first, at an instant of our choice
        rig.pool.stop()

    rig.play(script)
    assert [(who, outcome) for _, who, outcome, _ in rig.heard.outcomes] == [
        ("a", "rejected"),  # it can never fit the pool
        ("b", "cancelled"),
    ]
    with pytest.raises(Unavailable):
        rig.driver.submit([rig.request("c", 1)])
    rig.driver.close()


def test_unknown_ids_are_ignored_and_new_settings_are_taken_over() -> None:
    def script(rig: Rig) -> None:
        rig.driver.cancel("nobody")
        rig.driver.release(["nobody"])
        rig.driver.release([])
        rig.driver.reconfigure(SchedulerSettings(policy="fcfs", ageing=None))
        rig.driver.submit([rig.request("a", 1)])
        rig.clock.sleep_until_s(5)
        assert rig.scheduler.settings.policy == "fcfs"
        assert [who for _, who, _, _ in rig.heard.outcomes] == ["a"]
        assert rig.driver.snapshot() == rig.heard.states[-1]

    Rig().play(script)
