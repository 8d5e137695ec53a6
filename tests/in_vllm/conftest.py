"""These tests run in vLLM's own environment, with its engine core inside the test's process: `make test-vllm`."""

from __future__ import annotations

import gc
import importlib.util
import os
import threading
from collections.abc import Iterator

import pytest

from support.vllm.in_process import prepare

HERE = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HERE else ["test_*.py"]

if HERE:
    prepare()
    from support.vllm.bench import Bench, engine_core
    from support.vllm.models import FAMILIES, model_directory, small
    from support.vllm.rank_bench import RankBench, ranked_core

NUM_SLOTS = 5
WHOLE_MATRIX = "FLOWPREFILL_VLLM_MATRIX"
"""Environment variable: set, modules with several variants run on all there are. Figures do; it takes long."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A module says in VARIANTS which engines its tests run on: a family, a family compiled, or one on two ranks."""
    if "variant" not in metafunc.fixturenames:
        return
    variants = metafunc.module.VARIANTS
    if os.environ.get(WHOLE_MATRIX) and len(variants) > 1:
        variants = tuple(f"{family}{how}" for how in ("", " compiled", " ranks") for family in FAMILIES)
    metafunc.parametrize("variant", variants, scope="module")


@pytest.fixture(scope="module")
def loaded(variant: str) -> Iterator[Bench]:
    """An engine core of the variant's generated model; one at a time, since vLLM has one per process."""
    family, _, how = variant.partition(" ")
    model, eager = model_directory(small(family)), how != "compiled"
    bench: Bench
    if how == "ranks":
        core = ranked_core(model, settings={"slots": NUM_SLOTS})
        bench = RankBench(core, NUM_SLOTS)
    else:
        core = engine_core(model, settings={"slots": NUM_SLOTS}, enforce_eager=eager)
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
