"""A rank that dies ends the engine, and nothing of it is left."""

from __future__ import annotations

import os
import queue
import signal
import threading
from pathlib import Path

from flowprefill.server.vllm.ranks.crew import RanksLost
from support.vllm.models import model_directory, small
from support.vllm.rank_bench import RankBench, ranked_core
from support.vllm.tokens import random_prompt
from support.vllm.usage import usage

NUM_SLOTS = 3
WAIT_S = 60.0


def test_a_rank_that_is_killed_ends_the_engine_and_leaves_nothing() -> None:
    threads = set(threading.enumerate())
    core = ranked_core(model_directory(small("llama")), settings={"slots": NUM_SLOTS})
    try:
        bench = RankBench(core, NUM_SLOTS)
        lost: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        bench._ranked.connect(lambda event: None, lost.put)
        bench.add("a", random_prompt(3000, seed=1))
        bench.launch("a")
        held = usage(os.getpid())
        ranks = [worker.proc for worker in core.model_executor.workers]
        os.kill(ranks[1].pid, signal.SIGKILL)
        error = lost.get(timeout=WAIT_S)
        assert isinstance(error, RanksLost)
        assert "has gone" in str(error)
    finally:
        core.shutdown()
    for rank in ranks:
        rank.join(WAIT_S)
        assert rank.exitcode is not None, "every rank's process has ended"
    # vLLM's own queue of the killed rank is Python's resource tracker's to remove, when this process ends.
    left = [path for path in held.shared_memory if Path(path).exists()]
    assert [path for path in left if not path.startswith(("/dev/shm/psm_", "/dev/shm/sem."))] == []
    ours = [thread for thread in threading.enumerate() if thread not in threads and "rank" in thread.name]
    for thread in ours:
        thread.join(WAIT_S)
        assert not thread.is_alive(), thread.name
