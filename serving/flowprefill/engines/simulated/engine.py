"""The simulated engine: real protocol, real KV accounting, time from a cost model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from flowprefill.clock import Timekeeper
from flowprefill.engines.protocol import (
    DecodeSequence,
    EngineSpec,
    Gate,
    Plan,
    PrefillItem,
)
from flowprefill.engines.simulated.cost import CostModel
from flowprefill.engines.simulated.kv import DTYPE, WORD_BYTES, MarkerStore, fingerprints, next_token
from flowprefill.engines.simulated.timetable import Timetable
from flowprefill.scheduling.actions import Granularity


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPlan:
    """A batch and when it reaches its points."""

    timetable: Timetable
    prefill: tuple[PrefillItem, ...] = ()
    decode: tuple[DecodeSequence, ...] = ()

    @property
    def num_points(self) -> int:
        return self.timetable.num_points

    @property
    def max_points_between_collectives(self) -> int:
        return self.timetable.max_points_between_collectives

    def work_done(self, index: int) -> float:
        return self.timetable.work_done(index)


class SimulatedEngine:
    """Implements `engines.protocol.Engine`.

    Its model is a fixed function of the tokens before, so equal prompts give equal tokens and a prompt whose KV is
    wrong gives others, or `WrongKV`: before it computes, it checks all KV that a prompt builds on.
    """

    def __init__(
        self,
        cost: CostModel,
        clock: Timekeeper,
        *,
        num_kv_blocks: int,
        block_size: int = 16,
        max_model_len: int = 131072,
        max_gap_s: float | None = None,
        vocab_size: int = 49152,
        eos_token_ids: tuple[int, ...] = (),
        model: str = "simulated",
        revision: str = "0",
    ) -> None:
        self.cost = cost
        self._clock = clock
        self._max_gap_s = max_gap_s
        self._kv = MarkerStore(num_kv_blocks, block_size)
        self._spec = EngineSpec(
            engine="simulated",
            model=model,
            revision=revision,
            device=cost.name,
            dtype=DTYPE,
            max_model_len=max_model_len,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            kv_block_bytes=2 * block_size * WORD_BYTES,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            tensor_parallel_size=cost.tensor_parallel_size,
        )

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    def thread_context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def plan_prefill(self, items: Sequence[PrefillItem], granularity: Granularity) -> SimulatedPlan:
        for item in items:
            self._check(item.request_id, item.token_ids, item.start, item.block_ids)
            self._kv.clear(item.block_ids, item.start, item.start + len(item.token_ids))
        shapes = [(len(item.token_ids), item.start) for item in items]
        return SimulatedPlan(
            timetable=self.cost.prefill(shapes, granularity, self._max_gap_s), prefill=tuple(items)
        )

    def plan_decode(self, sequences: Sequence[DecodeSequence]) -> SimulatedPlan:
        for sequence in sequences:
            self._check(sequence.request_id, [sequence.last_token_id], sequence.position, sequence.block_ids)
        num_cached = [sequence.position for sequence in sequences]
        return SimulatedPlan(timetable=self.cost.decode(num_cached, self._max_gap_s), decode=tuple(sequences))

    def run(self, plan: Plan, gate: Gate) -> Sequence[int | None]:
        assert isinstance(plan, SimulatedPlan)
        for item in plan.prefill:
            self._kv.verify(item.block_ids, 0, item.start, whose=item.request_id)
        for sequence in plan.decode:
            end = sequence.position  # the last block is enough: each step checks the one before it
            self._kv.verify(
                sequence.block_ids, max(end - self._spec.block_size, 0), end, whose=sequence.request_id
            )
        self._spend(plan.timetable, gate)
        return [self._prefilled(item) for item in plan.prefill] + [self._decoded(s) for s in plan.decode]

    def read_blocks(self, block_ids: Sequence[int]) -> memoryview:
        self._kv.check_blocks(block_ids, 0)
        return self._kv.read(block_ids)

    def write_blocks(self, block_ids: Sequence[int], data: memoryview) -> None:
        self._kv.check_blocks(block_ids, 0)
        self._kv.put(block_ids, data)

    def close(self) -> None:
        return

    def next_token_id(self, token_ids: Sequence[int]) -> int:
        """The greedy token after this whole prompt, computed without any KV: what `run` must agree with."""
        last = fingerprints(np.asarray(token_ids, dtype=np.uint64), 0)[-1]
        return next_token(int(last), self._spec.vocab_size)

    def _spend(self, timetable: Timetable, gate: Gate) -> None:
        """Sleep from point to point. Deadlines are absolute, so that late wake-ups do not add up."""
        began_s, base_s = self._clock.now_s(), 0.0
        for index in range(timetable.num_points):
            offset_s = timetable.offset_s(index)
            self._clock.sleep_until_s(began_s + (offset_s - base_s))
            gate.index = index
            if gate.raised:
                gate.pause(index)
                began_s, base_s = self._clock.now_s(), offset_s
        self._clock.sleep_until_s(began_s + (timetable.total_s - base_s))

    def _prefilled(self, item: PrefillItem) -> int | None:
        last = self._kv.write(item.block_ids, item.token_ids, item.start)
        if not item.sample:
            return None
        salt = 0
        if item.sampling.temperature > 0:
            salt = _salt(random.Random(item.sampling.seed))
        return next_token(last, self._spec.vocab_size, salt)

    def _decoded(self, sequence: DecodeSequence) -> int:
        last = self._kv.write(sequence.block_ids, [sequence.last_token_id], sequence.position)
        salt = 0
        if sequence.sampling.temperature > 0:
            if sequence.generator is None:
                sequence.generator = generator = random.Random(sequence.sampling.seed)
                for _ in range(sequence.num_sampled):
                    _salt(generator)
            assert isinstance(sequence.generator, random.Random)
            salt = _salt(sequence.generator)
        token_id = next_token(last, self._spec.vocab_size, salt)
        while token_id in sequence.banned_token_ids:
            token_id = (token_id + 1) % self._spec.vocab_size
        return token_id

    def _check(self, request_id: str, token_ids: Sequence[int], start: int, block_ids: Sequence[int]) -> None:
        end = start + len(token_ids)
        if not token_ids or end > self._spec.max_model_len:
            raise ValueError(
                f"request {request_id} asks for positions [{start}, {end}); accepted are 1 token or more "
                f"before {self._spec.max_model_len}"
            )
        self._kv.check_blocks(block_ids, end)
        lowest, highest = min(token_ids), max(token_ids)
        if lowest < 0 or highest >= self._spec.vocab_size:
            raise ValueError(
                f"request {request_id} has token ids from {lowest} to {highest}; accepted are 0 to "
                f"{self._spec.vocab_size - 1}"
            )


def _salt(generator: random.Random) -> int:
    """One draw of a sampled answer."""
    return generator.getrandbits(64)
