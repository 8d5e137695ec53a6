"""Steps on two ranks: pauses that a message asks for, and what the ranks' KV connectors say as one."""

from __future__ import annotations

import random
import time

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput

from flowprefill.server.vllm.ranks.connectors import ConnectorReports
from support.vllm.bench import Bench
from support.vllm.tokens import random_prompt

VARIANTS = ("llama ranks", "qwen3_moe ranks")

NUM_PAUSES = 25


def test_pauses_asked_for_at_any_moment(bench: Bench) -> None:
    chance = random.Random(5)
    given = {f"long-{k}": random_prompt(1500, seed=k) for k in range(NUM_PAUSES)}
    given |= {f"short-{k}": random_prompt(30, seed=100 + k) for k in range(NUM_PAUSES)}
    for name, prompt in given.items():
        bench.add(name, prompt)
    began_s = time.monotonic()
    bench.start("long-0")
    usual_s = time.monotonic() - began_s
    stood_s = []
    for k in range(1, NUM_PAUSES):
        flight = bench.launch(f"long-{k}")
        if not bench.wait(flight, chance.random() * usual_s):
            asked_s = time.monotonic()
            if bench.pause(flight):
                stood_s.append(time.monotonic() - asked_s)
        bench.start(f"short-{k}")
        if flight.record is None:
            bench.resume(flight)
    bench.start("short-0")
    assert len(stood_s) > NUM_PAUSES / 3, "else nothing is tested"
    # The models have 4 layers, so ranks meet 8 times a prefill; a pause waits for one meeting, and half of one on average.
    assert sorted(stood_s)[len(stood_s) // 2] < usual_s / 2
    bench.same_without_pauses(given)


def test_a_transfer_is_over_when_every_rank_has_said_so() -> None:
    reports = ConnectorReports(KVOutputAggregator(expected_finished_count=2))
    early = reports.joined([KVConnectorOutput(finished_sending={"a"}), None])
    assert not early.finished_sending
    late = reports.joined([None, KVConnectorOutput(finished_sending={"a", "b"}, finished_recving={"c"})])
    assert late.finished_sending == {"a"}
    assert not late.finished_recving
    assert reports.joined([None, None]) is None
