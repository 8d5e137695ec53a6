"""KV that waits to be pulled: it takes room in the pool, and who waits for room goes on once it has been pulled."""

from __future__ import annotations

import pytest
from vllm.v1.outputs import KVConnectorOutput

from support.vllm.bench import Bench
from support.vllm.loop_bench import LoopBench
from support.vllm.tokens import random_prompt

VARIANTS = ("llama",)
HELD = ("a", "b", "c")
"""Of 125 blocks each: 24 of the pool's 399 are left."""


@pytest.fixture
def keeping(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """An engine core that keeps the blocks of each finished prompt until a connector says that they were pulled."""
    monkeypatch.setattr(bench.vllm, "_connector_finished", lambda request: (True, {}))
    return bench


def pulled(loop: LoopBench, *request_ids: str) -> None:
    loop.loop.connector_news(KVConnectorOutput(finished_sending=set(request_ids)))


def test_a_prompt_that_waits_for_room_goes_on_when_anothers_kv_was_pulled(keeping: Bench) -> None:
    bench = keeping
    free = bench.num_free_blocks
    with LoopBench(bench) as loop:
        for k, name in enumerate(HELD):
            loop.send(name, random_prompt(4000, seed=k), ttft_slo=60.0)
        loop.until_finished(*HELD)
        assert bench.num_free_blocks == free - 3 * 125
        loop.send("next", random_prompt(2000, seed=9), ttft_slo=60.0)
        loop.until(lambda: loop.scheduler.snapshot(0.0).waiting == 1, "it waits")
        pulled(loop, "b")
        loop.until_finished("next")
        pulled(loop, "a", "c", "next")
        loop.until(lambda: bench.num_free_blocks == free, "all is free")
        loop.until(lambda: loop.seen[-1].kv_blocks_free == loop.seen[-1].kv_blocks, "and told of")
