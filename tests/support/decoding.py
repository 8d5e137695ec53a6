"""A decoder on virtual time with a simulated model, alone in its pod or beside prefill."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal

from flowprefill.engines.protocol import (
    GREEDY,
    DecodeSequence,
    EngineSpec,
    Gate,
    Plan,
    PrefillItem,
)
from flowprefill.engines.simulated.cost import CostModel
from flowprefill.engines.simulated.engine import SimulatedEngine
from flowprefill.engines.simulated.presets import TINY
from flowprefill.execution.colocated import ColocatedDecode
from flowprefill.execution.decode import DecodeJob, Decoder, EndReason
from flowprefill.execution.decode_loop import DecodeLoop
from flowprefill.execution.driver import SchedulerDriver
from flowprefill.execution.listener import SilentListener
from flowprefill.execution.pool import ExecutionPool, Items
from flowprefill.execution.results import Finished
from flowprefill.execution.virtual_clock import VirtualClock
from flowprefill.scheduling.actions import Granularity, Outcome, Task
from flowprefill.scheduling.kv import KVCachePool
from flowprefill.scheduling.predictor import Predictor
from flowprefill.scheduling.scheduler import Scheduler
from flowprefill.scheduling.settings import SchedulerSettings

BLOCK_SIZE = 4
NUM_PREFILL_BLOCKS = 50
VOCAB_SIZE = 300
Where = Literal["alone", "colocated"]


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
