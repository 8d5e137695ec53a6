"""Decode steps beside prefill: they keep their time between tokens, and long prompts still get on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from flowprefill.engines.protocol import PrefillItem, SamplingParams
from flowprefill.engines.simulated.engine import SimulatedEngine
from flowprefill.engines.simulated.presets import TINY
from flowprefill.execution.colocated import ColocatedDecode
from flowprefill.execution.decode import DecodeJob, EndReason
from flowprefill.execution.driver import SchedulerDriver
from flowprefill.execution.listener import SilentListener
from flowprefill.execution.pool import ExecutionPool, Items
from flowprefill.execution.results import Finished, FinishedDecode, FinishedPrefill
from flowprefill.execution.virtual_clock import VirtualClock
from flowprefill.request import Request
from flowprefill.scheduling.actions import Outcome, Task
from flowprefill.scheduling.kv import KVCachePool
from flowprefill.scheduling.predictor import Predictor
from flowprefill.scheduling.scheduler import Scheduler
from flowprefill.scheduling.settings import Preemption, SchedulerSettings

COST = TINY.scaled(10)  # 2,000 tokens take 1.1 s, a decode step of one sequence 0.02 s
NUM_PREFILL_BLOCKS = 300
NUM_DECODE_BLOCKS = 300
BLOCK_SIZE = 16
TBT_S = 0.1
VOCAB_SIZE = 500
FILLED = FinishedPrefill(
    request_id="any", token_id=None, block_ids=(0,), num_tokens=1, num_cached_tokens=0, num_tasks=1
)


class Pod(SilentListener):
    """A pod that prefills and decodes: each prompt that completes is copied over and decoded."""

    def __init__(self, preemption: Preemption) -> None:
        self.clock = VirtualClock()
        self.engine = SimulatedEngine(
            COST,
            self.clock,
            num_kv_blocks=NUM_PREFILL_BLOCKS + NUM_DECODE_BLOCKS,
            block_size=BLOCK_SIZE,
            max_gap_s=0.01,
            vocab_size=VOCAB_SIZE,
        )
        scheduler = Scheduler(
            SchedulerSettings(preemption=preemption, ageing=None),
            KVCachePool(NUM_PREFILL_BLOCKS, BLOCK_SIZE),
            Predictor(COST.coefficients),
        )
        self.decoder = ColocatedDecode(
            KVCachePool(NUM_DECODE_BLOCKS, BLOCK_SIZE),
            self,
            self.clock,
            max_batch_size=8,
            queue_limit=8,
            block_offset=NUM_PREFILL_BLOCKS,
        )
        self.pool = ExecutionPool(self.engine, self.clock)
        self.driver = SchedulerDriver(scheduler, self.pool, self.clock, self._payload, self)
        self.prompts: dict[str, list[int]] = {}
        self.max_tokens: dict[str, int] = {}
        self.prefilled: dict[str, tuple[float, FinishedPrefill]] = {}
        self.token_times_s: dict[str, list[float]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, EndReason] = {}

    def play(self, script: Callable[[Pod], None]) -> None:
        raised: list[BaseException] = []

        def main() -> None:
            self.decoder.connect(self.driver)
            self.driver.start()
            try:
                script(self)
            except BaseException as error:
                raised.append(error)

        thread = self.clock.start_thread(main, name="script", rank=5)
        thread.join(60)
        assert not thread.is_alive()
        self.driver.close()
        self.decoder.close()
        if raised:
            raise raised[0]

    def ask(self, request_id: str, num_tokens: int, max_tokens: int, *, slo_s: float = 30.0) -> None:
        chance = random.Random(request_id)
        self.prompts[request_id] = [chance.randrange(VOCAB_SIZE) for _ in range(num_tokens)]
        self.max_tokens[request_id] = max_tokens
        now_s = self.clock.now_s()
        request = Request(
            request_id=request_id,
            num_prompt_tokens=num_tokens,
            arrival_s=now_s,
            deadline_s=now_s + slo_s,
            ttft_slo_s=slo_s,
        )
        self.driver.submit([request])

    def gaps_s(self, request_id: str) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.token_times_s[request_id])]

    def on_finish(self, request_id: str, outcome: Outcome, reason: str, result: Finished | None) -> None:
        if self.decoder.on_finish(request_id, outcome, reason, result):
            return
        assert isinstance(result, FinishedPrefill), reason
        self.prefilled[request_id] = (self.clock.now_s(), result)
        prompt = self.prompts[request_id]
        self.decoder.submit(
            DecodeJob(
                request_id=request_id,
                num_prompt_tokens=len(prompt),
                last_token_id=prompt[-1],
                max_tokens=self.max_tokens[request_id],
                sampling=SamplingParams(temperature=0.0),
                tbt_slo_s=TBT_S,
            )
        )

    def on_admitted(self, request_id: str, block_ids: Sequence[int], num_cached_tokens: int) -> None:
        source = self.prefilled[request_id][1].block_ids
        self.engine.write_blocks(block_ids, self.engine.read_blocks(source))
        self.driver.release([request_id])
        self.decoder.filled(request_id)

    def on_token(self, request_id: str, token_id: int) -> None:
        self.tokens.setdefault(request_id, []).append(token_id)
        self.token_times_s.setdefault(request_id, []).append(self.clock.now_s())

    def on_end(self, request_id: str, reason: EndReason, detail: str) -> None:
        assert not detail
        self.ends[request_id] = reason

    def _payload(self, task: Task) -> Items:
        if task.kind == "decode":
            return self.decoder.payload(task)
        return [
            PrefillItem(
                request_id=item.request_id,
                token_ids=self.prompts[item.request_id][item.start : item.start + item.num_tokens],
                start=item.start,
                block_ids=item.block_ids,
                sample=item.completes,
            )
            for item in task.items
        ]


def chat_beside_a_document(pod: Pod) -> None:
    pod.ask("chat", 20, 300)
    pod.clock.sleep_until_s(0.5)
    pod.ask("document", 2000, 4)
    pod.clock.sleep_until_s(60)
    for request_id in ("chat", "document"):
        text = list(pod.prompts[request_id])
        for token_id in pod.tokens[request_id]:
            assert token_id == pod.engine.next_token_id(text)
            text.append(token_id)
        assert pod.ends[request_id] == "length"
        assert len(pod.tokens[request_id]) == pod.max_tokens[request_id]


def test_tokens_keep_their_pace_while_a_long_prompt_runs() -> None:
    pod = Pod("operator")
    pod.play(chat_beside_a_document)
    assert max(pod.gaps_s("chat")) <= TBT_S


def test_without_preemption_a_long_prompt_stops_all_answers() -> None:
    pod = Pod("none")
    pod.play(chat_beside_a_document)
    alone_s = COST.prefill_s([(2000, 0)])
    assert max(pod.gaps_s("chat")) > 0.9 * alone_s


def test_a_long_prompt_gets_the_time_that_paced_steps_leave() -> None:
    pod = Pod("operator")
    pod.play(chat_beside_a_document)
    alone_s = COST.prefill_s([(2000, 0)])
    took_s = pod.prefilled["document"][0] - 0.5
    # One step of about 0.02 s in every 0.05 s: under half of the time goes to decoding. Steps one after the other
    # would take the engine for 5 s more.
    assert took_s < 2 * alone_s


def test_with_no_prompt_there_steps_follow_each_other_at_once() -> None:
    def script(pod: Pod) -> None:
        pod.ask("chat", 20, 30)
        pod.clock.sleep_until_s(60)

    pod = Pod("operator")
    pod.play(script)
    step_s = COST.decode([20], None).total_s
    assert max(pod.gaps_s("chat")) == pytest.approx(step_s, rel=0.05)


class Steps:
    """Stands in for a driver and keeps the steps it was given."""

    num_outstanding = 0

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def submit(self, requests: Sequence[Request], *, bounded: bool = True) -> None:
        assert not bounded
        self.requests += requests


def test_a_step_is_due_with_its_oldest_token_or_later_when_that_is_lost() -> None:
    pod = Pod("operator")
    steps = Steps()

    def script() -> None:
        pod.decoder.connect(steps)
        for name in ("a", "b"):
            job = DecodeJob(
                request_id=name,
                num_prompt_tokens=1,
                last_token_id=1,
                max_tokens=9,
                sampling=SamplingParams(),
                tbt_slo_s=TBT_S if name == "a" else 2 * TBT_S,
            )
            pod.prefilled[name] = (0.0, FILLED)
            pod.decoder.submit(job)
        first = steps.requests[0]
        assert (first.kind, first.num_prompt_tokens, first.deadline_s) == ("decode", 1, TBT_S)
        pod.clock.sleep_until_s(0.03)
        done = FinishedDecode(request_id=first.request_id, token_ids=(5,))
        assert pod.decoder.on_finish(first.request_id, "completed", "", done)
        both = steps.requests[1]
        assert (both.num_prompt_tokens, both.deadline_s) == (2, 0.03 + TBT_S)
        pod.clock.sleep_until_s(9.0)
        assert pod.decoder.on_finish(both.request_id, "failed", "broken", None)
        alone = steps.requests[2]  # each of the two is tried by itself, long after the deadline of both
        assert (alone.num_prompt_tokens, alone.deadline_s) == (1, 9.0 + TBT_S)
        assert not pod.decoder.on_finish("a prompt", "completed", "", None)

    thread = pod.clock.start_thread(script, name="script")
    thread.join(20)
    pod.decoder.close()
    assert len(steps.requests) == 3
    assert pod.ends == {"a": "cancelled", "b": "cancelled"}
