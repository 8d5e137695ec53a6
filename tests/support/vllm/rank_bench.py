"""`Bench` with tensor parallel: the engine core in this process, its ranks in processes of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowprefill.clock import MonotonicClock
from flowprefill.scheduling.actions import Granularity
from flowprefill.server.vllm.ranks.pool import RankedPool
from flowprefill.server.vllm.step_pool import StepPool
from support.vllm.bench import Bench, Flight, Member, StepRecord, engine_core
from support.vllm.tokens import random_prompt
from vllm.v1.engine.core import EngineCore


def ranked_core(
    model: Path, *, settings: Mapping[str, Any], num_ranks: int = 2, **engine_args: Any
) -> EngineCore:
    """An engine core on so many ranks, each with a probe."""
    return engine_core(
        model,
        settings=settings,
        tensor_parallel_size=num_ranks,
        worker_cls="support.vllm.rank_probe.ProbeWorker",
        distributed_executor_backend="flowprefill.server.vllm.ranks.executor.RankedExecutor",
        **engine_args,
    )


RANKS_WAIT_S = 100.0
"""As `WAIT_S`: ranks of the tests share two cores, and each spins while it waits for the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FarWorker:
    """What tests read off a worker."""

    num_points: Mapping[Granularity, int]


class RankBench(Bench):
    """Pauses come where the ranks meet: at the first collective behind the point that a test names, or not at all."""

    def _build(self) -> None:
        executor = self.core.model_executor
        self._ranked: RankedPool = executor.ranked_pool(MonotonicClock(), self._num_slots)
        self._ranked.connect(self._events.put)
        self._pool = self._ranked
        self.runner = self._ranked
        self.worker = FarWorker(num_points=self._ranked.num_points)

    def __init__(self, core: EngineCore, num_slots: int) -> None:
        self._num_slots = num_slots
        self._points = 0
        self._asking = threading.Lock()  # a test and its loop may ask at once
        super().__init__(core)
        self.wait_s = RANKS_WAIT_S
        self._settle()

    def _settle(self) -> None:
        """The first steps of a process compile what splits the vocabulary, which takes seconds."""
        for number, length in enumerate((200, 2000, 40)):
            self.add(f"first-{number}", random_prompt(length, seed=number))
            self.start(f"first-{number}")
        self.flush()
        self._free_before = self.num_free_blocks

    def _expect(self, flight: Flight) -> None:
        self._rpc("probe_expect", flight.task_id, flight.pause_at)
        flight.pause_at = None

    def _completed(self, flight: Flight) -> None:
        super()._completed(flight)
        flight.points = self._points

    def computed(self, task_id: int, members: tuple[Member, ...]) -> StepRecord:
        blocks = {m.request_id: self._full_blocks(m) for m in members if m.request_id in self.vllm.requests}
        by_rank = self._rpc("probe_computed", task_id, blocks)
        logits, _, self._points = by_rank[0]  # ranks gather logits at the first
        kv = {name: "-".join(found[name] for _, found, _ in by_rank) for name in blocks}
        return StepRecord(members=members, logits=logits, kv=kv)

    def loop_pool(self) -> StepPool:
        return _Kept(self._ranked)

    def watch_points(self, watched: bool) -> None:
        if watched:
            self._ranked.connect(self._events.put)

    def may_overtake(self, point: int, granularity: Granularity) -> bool:
        """Behind the last collective but one nobody meets any more."""
        stretch = 3 if granularity == "operator" else 1
        return point >= self.worker.num_points[granularity] - stretch

    def left_over(self) -> dict[str, object]:
        found = super().left_over()
        found |= {f"rank {rank}": left for rank, left in enumerate(self._rpc("probe_left_over")) if left}
        return found

    def _left_over_here(self) -> dict[str, object]:
        ranked = self._ranked
        return {
            "flights": dict(ranked._flights),
            "results": dict(ranked._results),
            "left behind": dict(ranked._left_behind),
            "holder": ranked._holder,
        }

    @contextmanager
    def failing_at(self, point: int, reason: str) -> Iterator[None]:
        self._rpc("probe_fail_at", (point, reason))
        try:
            yield
        finally:
            self._rpc("probe_fail_at", None)

    @property
    def num_slots(self) -> int:
        return self._num_slots

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        with self._asking:
            answers: list[Any] = self.core.model_executor.collective_rpc(method, args=args, timeout=60)
        return answers


class _Kept:
    """The ranks' pool for a loop, whose end is not the ranks'."""

    def __init__(self, pool: RankedPool) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def close(self) -> None:
        """Unwind what is under way, and wait for it."""
        with self._pool._state:
            under_way = tuple(self._pool._flights)
        for task_id in under_way:
            self._pool.cancel(task_id)
        with self._pool._state:
            assert self._pool._state.wait_for(lambda: not self._pool._flights, RANKS_WAIT_S), "steps unwind"
            for task_id in under_way:
                self._pool._results.pop(task_id, None)
                self._pool._left_behind.pop(task_id, None)
