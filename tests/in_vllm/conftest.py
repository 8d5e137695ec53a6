"""These tests run in vLLM's own environment, with its engine core inside the test's process: `make test-vllm`."""

from __future__ import annotations

import gc
import importlib.util
import os
import threading
from collections.abc import Iterator

import pytest

# Read by vLLM when it is imported.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

HERE = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HERE else ["test_*.py"]

if HERE:
    from support.vllm.bench import Bench, engine_core
    from support.vllm.models import FAMILIES, Family, model_directory, small
else:
    FAMILIES = ()

NUM_SLOTS = 5


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    """Each family of models in turn."""
    found: Family = request.param
    return found


@pytest.fixture(scope="module")
def loaded(family: Family) -> Iterator[Bench]:
    """An engine core of the family's generated model; one for a module, since vLLM has one per process."""
    core = engine_core(model_directory(small(family)), settings={"slots": NUM_SLOTS})
    bench = Bench(core)
    yield bench
    bench.close()
    core.shutdown()
    del core
    gc.collect()


@pytest.fixture
def bench(loaded: Bench) -> Iterator[Bench]:
    """The engine core, empty. What a test leaves behind fails it: blocks, slots, requests, threads."""
    loaded.begin_test()
    threads = threading.active_count()
    yield loaded
    loaded.flush()
    assert loaded.left_over() == {}
    assert threading.active_count() <= threads + NUM_SLOTS, "threads of steps are reused"
