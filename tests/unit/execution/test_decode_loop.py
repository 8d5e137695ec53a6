"""Decoding with continuous batching: the same behaviour in a thread of its own and beside prefill.

The simulated model is a fixed function of the tokens before, so every answer can be computed without any KV.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import pytest

from flowprefill.engines.protocol import (
    DecodeSequence,
    EngineSpec,
    Gate,
    Plan,
    PrefillItem,
    SamplingParams,
)
from flowprefill.engines.simulated.cost import CostModel
from flowprefill.engines.simulated.engine import SimulatedEngine
from flowprefill.engines.simulated.presets import TINY
from flowprefill.errors import InvalidRequest, QueueFull, Unavailable
from flowprefill.execution.colocated import ColocatedDecode
from flowprefill.execution.decode import DecodeJob, Decoder, EndReason
from flowprefill.execution.decode_loop import DecodeLoop
from flowprefill.execution.driver import SchedulerDriver
from flowprefill.execution.listener import SilentListener
from flowprefill.execution.pool import ExecutionPool, Items
from flowprefill.execution.results import Finished
from flowprefill.execution.virtual_clock import VirtualClock
from flowprefill.scheduling.actions import Granularity, Outcome, Task
from flowprefill.scheduling.kv import KVCachePool, prefix_hashes
from flowprefill.scheduling.predictor import Predictor
from flowprefill.scheduling.scheduler import Scheduler
from flowprefill.scheduling.settings import SchedulerSettings

BLOCK_SIZE = 4
NUM_PREFILL_BLOCKS = 50
VOCAB_SIZE = 300
GREEDY = SamplingParams(temperature=0.0)
Where = Literal["alone", "colocated"]
everywhere = pytest.mark.parametrize("where", ["alone", "colocated"])


class BrittleEngine:
    """The simulated engine, with decode steps that fail when a sequence in `breaks` takes part."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.inner = engine
        self.breaks: set[str] = set()
        self.batch_sizes: list[int] = []

    @property
    def spec(self) -> EngineSpec:
        return self.inner.spec

    def thread_context(self) -> AbstractContextManager[object]:
        return self.inner.thread_context()

    def plan_prefill(self, items: Sequence[PrefillItem], granularity: Granularity) -> Plan:
        return self.inner.plan_prefill(items, granularity)

    def plan_decode(self, sequences: Sequence[DecodeSequence]) -> Plan:
        broken = self.breaks & {sequence.request_id for sequence in sequences}
        if broken:
            raise RuntimeError(f"{sorted(broken)} broke")
        self.batch_sizes.append(len(sequences))
        return self.inner.plan_decode(sequences)

    def run(self, plan: Plan, gate: Gate) -> Sequence[int | None]:
        return self.inner.run(plan, gate)

    def read_blocks(self, block_ids: Sequence[int]) -> memoryview:
        return self.inner.read_blocks(block_ids)

    def write_blocks(self, block_ids: Sequence[int], data: memoryview) -> None:
        self.inner.write_blocks(block_ids, data)

    def close(self) -> None:
        self.inner.close()


class Rig(SilentListener):
    """A decoder, a model that can fill its blocks, and what the listener heard."""

    def __init__(
        self,
        where: Where,
        *,
        num_blocks: int = 40,
        max_batch_size: int = 4,
        queue_limit: int = 8,
        cost: CostModel = TINY,
    ) -> None:
        self.clock = VirtualClock()
        offset = NUM_PREFILL_BLOCKS if where == "colocated" else 0
        total = num_blocks + offset
        engine = SimulatedEngine(
            cost, self.clock, num_kv_blocks=total, block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE
        )
        self.engine = BrittleEngine(engine)
        self.kv = KVCachePool(num_blocks, BLOCK_SIZE)
        self.prompts: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.token_times_s: dict[str, list[float]] = {}
        self.ends: dict[str, tuple[EndReason, str]] = {}
        self.admitted: dict[str, tuple[tuple[int, ...], int]] = {}
        self.fill = True
        self._where = where
        self._raised: BaseException | None = None
        if where == "alone":
            self.loop = DecodeLoop(
                self.engine, self.kv, self, self.clock, max_batch_size=max_batch_size, queue_limit=queue_limit
            )
            self.decoder: Decoder = self.loop
            self.loop.start()
        else:
            self.colocated = ColocatedDecode(
                self.kv,
                self,
                self.clock,
                max_batch_size=max_batch_size,
                queue_limit=queue_limit,
                block_offset=offset,
            )
            self.decoder = self.colocated
            self.scheduler = Scheduler(
                SchedulerSettings(ageing=None),
                KVCachePool(NUM_PREFILL_BLOCKS, BLOCK_SIZE),
                Predictor(cost.coefficients),
            )
            self.pool = ExecutionPool(self.engine, self.clock)
            self.driver = SchedulerDriver(self.scheduler, self.pool, self.clock, self._payload, self)
            self.colocated.connect(self.driver)
            self.driver.start()

    def close(self) -> None:
        if self._where == "alone":
            self.loop.close()
        else:
            self.driver.close()
            self.colocated.close()

    def play(self, script: Callable[[Rig], None]) -> None:
        def main() -> None:
            try:
                script(self)
            except BaseException as error:
                self._raised = error

        thread = self.clock.start_thread(main, name="script", rank=5)
        thread.join(30)
        assert not thread.is_alive()
        self.close()
        if self._raised is not None:
            raise self._raised
        assert self.kv.num_free == self.kv.num_blocks, "every job gave its blocks back"

    def job(self, request_id: str, num_prompt: int, max_tokens: int, **changes: object) -> DecodeJob:
        chance = random.Random(request_id)
        prompt = [chance.randrange(VOCAB_SIZE) for _ in range(num_prompt)]
        self.prompts.setdefault(request_id, prompt)
        prompt = self.prompts[request_id]
        fields: dict[str, object] = {"sampling": GREEDY, **changes}
        return DecodeJob(
            request_id=request_id,
            num_prompt_tokens=len(prompt),
            last_token_id=prompt[-1],
            max_tokens=max_tokens,
            **fields,  # type: ignore[arg-type]
        )

    def expected(self, request_id: str, num_tokens: int) -> list[int]:
        """The greedy answer, from the whole text each time."""
        text = list(self.prompts[request_id])
        for _ in range(num_tokens):
            text.append(self.engine.inner.next_token_id(text))
        return text[len(self.prompts[request_id]) :]

    def bring(self, request_id: str) -> None:
        """Compute the prompt's KV elsewhere and put it into the job's blocks, all but what was cached."""
        block_ids, num_cached = self.admitted[request_id]
        prompt = self.prompts[request_id]
        elsewhere = SimulatedEngine(
            TINY, VirtualClock(), num_kv_blocks=len(block_ids), block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE
        )
        local = list(range(len(block_ids)))
        elsewhere._kv.write(local, prompt, 0)
        first = num_cached // BLOCK_SIZE
        if local[first:]:
            self.engine.write_blocks(block_ids[first:], elsewhere.read_blocks(local[first:]))

    # What is heard.

    def on_admitted(self, request_id: str, block_ids: Sequence[int], num_cached_tokens: int) -> None:
        self.admitted[request_id] = (tuple(block_ids), num_cached_tokens)
        if self.fill:
            self.bring(request_id)
            self.decoder.filled(request_id)

    def on_token(self, request_id: str, token_id: int) -> None:
        assert request_id not in self.ends
        self.tokens.setdefault(request_id, []).append(token_id)
        self.token_times_s.setdefault(request_id, []).append(self.clock.now_s())

    def on_end(self, request_id: str, reason: EndReason, detail: str) -> None:
        assert request_id not in self.ends, "a job ends once"
        self.ends[request_id] = (reason, detail)

    def on_finish(self, request_id: str, outcome: Outcome, reason: str, result: Finished | None) -> None:
        assert self.colocated.on_finish(request_id, outcome, reason, result)

    def _payload(self, task: Task) -> Items:
        return self.colocated.payload(task)


@everywhere
def test_answers_are_those_of_the_model_alone_and_join_and_leave_between_steps(where: Where) -> None:
    def script(rig: Rig) -> None:
        lengths = {"a": (5, 9), "b": (13, 2), "c": (8, 6), "d": (1, 5), "e": (4, 1), "f": (21, 4)}
        for number, (name, (num_prompt, max_tokens)) in enumerate(lengths.items()):
            rig.clock.sleep_until_s(number * 0.003)
            rig.decoder.submit(rig.job(name, num_prompt, max_tokens))
        rig.clock.sleep_until_s(10)
        for name, (_, max_tokens) in lengths.items():
            assert rig.tokens[name] == rig.expected(name, max_tokens)
            assert rig.ends[name] == ("length", "")
        assert max(rig.engine.batch_sizes) > 1
        state = rig.decoder.state()
        assert (state.queued, state.filling, state.active) == (0, 0, 0)
        assert state.num_tokens == 27

    Rig(where).play(script)


@everywhere
def test_a_batch_never_exceeds_its_size_and_nobody_waits_forever(where: Where) -> None:
    def script(rig: Rig) -> None:
        for number in range(8):
            rig.decoder.submit(rig.job(f"j{number}", 4, 5))
        rig.clock.sleep_until_s(10)
        assert max(rig.engine.batch_sizes) == 2
        for number in range(8):
            assert rig.tokens[f"j{number}"] == rig.expected(f"j{number}", 5)

    Rig(where, max_batch_size=2, num_blocks=200).play(script)


@everywhere
def test_jobs_wait_for_blocks_in_order_and_a_large_one_is_not_overtaken(where: Where) -> None:
    def script(rig: Rig) -> None:
        rig.decoder.submit(rig.job("first", 20, 20))  # 10 of 12 blocks
        rig.decoder.submit(rig.job("large", 30, 10))  # 10 blocks
        rig.decoder.submit(rig.job("small", 2, 2))  # 1 block, but behind the large one
        rig.clock.sleep_until_s(0.001)
        assert list(rig.admitted) == ["first"]
        assert rig.decoder.state().queued == 2
        rig.clock.sleep_until_s(10)
        assert list(rig.admitted) == ["first", "large", "small"]
        assert rig.ends == dict.fromkeys(["first", "small", "large"], ("length", ""))
        assert rig.tokens["large"] == rig.expected("large", 10)

    Rig(where, num_blocks=12).play(script)


@everywhere
def test_what_can_never_fit_or_finds_the_queue_full_is_refused(where: Where) -> None:
    def script(rig: Rig) -> None:
        with pytest.raises(
            InvalidRequest, match=r"need 13 KV blocks \(30 \+ 20 tokens\); the decode pool has 12"
        ):
            rig.decoder.submit(rig.job("huge", 30, 20))
        rig.fill = False
        rig.decoder.submit(rig.job("fills the pool", 20, 28))
        rig.clock.sleep_until_s(1)
        for number in range(3):
            rig.decoder.submit(rig.job(f"q{number}", 2, 2))
        with pytest.raises(QueueFull, match="3 answers wait to be decoded; the queue takes 3"):
            rig.decoder.submit(rig.job("one more", 2, 2))
        with pytest.raises(ValueError, match="'q0' is in use"):
            rig.decoder.submit(rig.job("q0", 2, 2))
        rig.bring("fills the pool")
        rig.fill = True
        rig.decoder.filled("fills the pool")
        rig.clock.sleep_until_s(10)
        assert {reason for reason, _ in rig.ends.values()} == {"length"}
        assert len(rig.ends) == 4

    Rig(where, num_blocks=12, queue_limit=3).play(script)


@everywhere
def test_a_stop_token_ends_the_answer_and_is_banned_until_enough_tokens_are_out(where: Where) -> None:
    def script(rig: Rig) -> None:
        job = rig.job("a", 6, 30)
        plain = rig.expected("a", 30)
        stop = plain[3]
        assert plain.index(stop) == 3
        rig.decoder.submit(rig.job("a", 6, 30, stop_token_ids=frozenset({stop})))
        rig.prompts["b"] = rig.prompts["a"]
        rig.decoder.submit(rig.job("b", 6, 30, stop_token_ids=frozenset({stop}), min_tokens=10))
        rig.clock.sleep_until_s(10)
        assert rig.tokens["a"] == plain[:4]
        assert rig.ends["a"] == ("stop", "")
        assert rig.tokens["b"][:3] == plain[:3]
        assert stop not in rig.tokens["b"][:10]
        assert len(rig.tokens["b"]) > 10
        assert job.num_reserved_tokens == 36

    Rig(where).play(script)


@everywhere
def test_equal_seeds_give_equal_answers_and_others_differ(where: Where) -> None:
    def script(rig: Rig) -> None:
        rig.job("a", 6, 12)
        for name, seed in {"a": 1, "b": 1, "c": 2}.items():
            rig.prompts[name] = rig.prompts["a"]
            sampling = SamplingParams(temperature=1.0, seed=seed)
            rig.decoder.submit(rig.job(name, 6, 12, sampling=sampling))
        rig.clock.sleep_until_s(10)
        assert rig.tokens["a"] == rig.tokens["b"]
        assert rig.tokens["a"] != rig.tokens["c"]

    Rig(where).play(script)


@everywhere
def test_cancelling_a_waiting_a_filling_and_a_running_job_frees_each_in_its_time(where: Where) -> None:
    def script(rig: Rig) -> None:
        rig.fill = False
        rig.decoder.submit(rig.job("filling", 20, 20))
        rig.clock.sleep_until_s(1)
        rig.decoder.submit(rig.job("waiting", 20, 20))
        rig.clock.sleep_until_s(2)
        rig.decoder.cancel("waiting")
        rig.decoder.cancel("filling")
        rig.decoder.cancel("nobody")
        rig.clock.sleep_until_s(3)
        assert rig.ends == {"waiting": ("cancelled", "")}
        assert rig.kv.num_free == 2  # somebody may still write the filling job's blocks
        rig.decoder.filled("filling")
        rig.clock.sleep_until_s(4)
        assert rig.ends["filling"] == ("cancelled", "")
        assert rig.kv.num_free == 12
        rig.fill = True
        rig.decoder.submit(rig.job("running", 20, 20))
        rig.clock.sleep_until_s(4.01)
        rig.decoder.cancel("running")
        rig.clock.sleep_until_s(10)
        assert rig.ends["running"] == ("cancelled", "")
        assert 0 < len(rig.tokens["running"]) < 20

    Rig(where, num_blocks=12).play(script)


@everywhere
def test_a_fill_that_fails_ends_its_job_with_the_reason(where: Where) -> None:
    def script(rig: Rig) -> None:
        rig.fill = False
        rig.decoder.submit(rig.job("a", 5, 5))
        rig.clock.sleep_until_s(1)
        rig.decoder.fill_failed("a", "the prefill pod is gone")
        rig.decoder.filled("a")  # too late, and ignored
        rig.clock.sleep_until_s(2)
        assert rig.ends == {"a": ("error", "the prefill pod is gone")}

    Rig(where).play(script)


@everywhere
def test_an_engine_error_ends_only_the_sequences_that_cause_it(where: Where) -> None:
    def script(rig: Rig) -> None:
        for name in ("a", "bad", "c"):
            rig.decoder.submit(rig.job(name, 5, 40))
        rig.clock.sleep_until_s(0.02)
        rig.engine.breaks.add("bad")
        rig.clock.sleep_until_s(10)
        reason, detail = rig.ends["bad"]
        assert reason == "error"
        assert "RuntimeError: ['bad'] broke" in detail
        assert 0 < len(rig.tokens["bad"]) < 40
        for name in ("a", "c"):
            assert rig.ends[name] == ("length", "")
            assert rig.tokens[name] == rig.expected(name, 40)

    Rig(where).play(script)


@everywhere
def test_kv_that_never_came_is_an_error_and_not_an_answer(where: Where) -> None:
    def script(rig: Rig) -> None:
        rig.fill = False
        rig.decoder.submit(rig.job("a", 9, 5))
        rig.clock.sleep_until_s(1)
        rig.decoder.filled("a")  # a lie
        rig.clock.sleep_until_s(2)
        reason, detail = rig.ends["a"]
        assert reason == "error"
        assert "KV that is not there" in detail
        assert "a" not in rig.tokens

    Rig(where).play(script)


@everywhere
def test_a_prompt_that_the_pool_holds_needs_only_its_rest(where: Where) -> None:
    def script(rig: Rig) -> None:
        first = rig.job("a", 14, 6)
        hashes = prefix_hashes(rig.prompts["a"], BLOCK_SIZE)
        rig.decoder.submit(rig.job("a", 14, 6, prefix_hashes=hashes))
        rig.clock.sleep_until_s(1)
        rig.prompts["b"] = rig.prompts["a"]
        rig.decoder.submit(rig.job("b", 14, 6, prefix_hashes=hashes))
        rig.clock.sleep_until_s(2)
        assert rig.admitted["a"][1] == 0
        assert rig.admitted["b"][1] == 12
        assert len(rig.admitted["b"][0]) == 4
        assert rig.tokens["a"] == rig.tokens["b"] == rig.expected("a", first.max_tokens)

    Rig(where).play(script)


@everywhere
def test_the_block_of_the_last_prompt_token_is_never_shared(where: Where) -> None:
    def script(rig: Rig) -> None:
        rig.job("long", 20, 4)
        rig.prompts["short"] = rig.prompts["long"][:12]  # three full blocks, all of them in the pool by then
        for name, num_tokens in {"long": 20, "short": 12}.items():
            hashes = prefix_hashes(rig.prompts[name], BLOCK_SIZE)
            rig.decoder.submit(rig.job(name, num_tokens, 4, prefix_hashes=hashes))
            rig.clock.sleep_until_s(rig.clock.now_s() + 0.005)
        rig.clock.sleep_until_s(1)
        assert rig.admitted["short"][1] == 8
        assert rig.admitted["short"][0][:2] == rig.admitted["long"][0][:2]
        assert rig.admitted["short"][0][2] != rig.admitted["long"][0][2]
        assert rig.tokens["short"] == rig.expected("short", 4)

    Rig(where).play(script)


@everywhere
def test_closing_ends_every_job_and_refuses_new_ones(where: Where) -> None:
    rig = Rig(where)

    def script(rig: Rig) -> None:
        rig.fill = False
        rig.decoder.submit(rig.job("a", 5, 5))
        rig.clock.sleep_until_s(1)

    thread = rig.clock.start_thread(lambda: script(rig), name="script")
    thread.join(10)
    rig.close()
    assert rig.ends == {"a": ("cancelled", "")}
    with pytest.raises(Unavailable):
        rig.decoder.submit(rig.job("b", 5, 5))
    rig.decoder.filled("a")
    rig.decoder.cancel("a")


def test_a_decode_thread_that_breaks_ends_its_jobs_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig("alone")

    def script(rig: Rig) -> None:
        def breaks(results: object) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(rig.loop._batch, "end_step", breaks)
        rig.decoder.submit(rig.job("a", 5, 5))
        rig.clock.sleep_until_s(1)
        assert rig.ends["a"][0] == "error"
        assert isinstance(rig.loop.crashed, ZeroDivisionError)
        with pytest.raises(Unavailable, match="must be restarted"):
            rig.decoder.submit(rig.job("b", 5, 5))

    rig.play(script)
