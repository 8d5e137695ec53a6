"""KV in a shared folder (vLLM's ExampleConnector) while prefills stop in the middle: what others find there."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.config import KVTransferConfig

from flowprefill.server.vllm.flags import WHOLE_FOLDERS
from support.vllm.bench import Bench, engine_core
from support.vllm.models import model_directory, small
from support.vllm.tokens import random_prompt

VARIANTS = ("llama",)
NUM_LAYERS = 4
IN_THE_MIDDLE = 12
"""A point in the third layer."""
PROMPT = random_prompt(500, seed=7)
NUM_FOUND = 480
"""Tokens of the prompt's full blocks of 32."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def loaded(variant: str, shared: Path) -> Iterator[Bench]:
    transfer = KVTransferConfig(
        **WHOLE_FOLDERS,
        kv_role="kv_producer",
        kv_connector_extra_config={"shared_storage_path": str(shared)},
    )
    core = engine_core(model_directory(small("llama")), settings={"slots": 3}, kv_transfer_config=transfer)
    bench = Bench(core)
    yield bench
    bench.close()
    core.shutdown()
    del core
    gc.collect()


def visible(shared: Path) -> list[int]:
    """For each folder that a consumer may find, its number of files."""
    return [len(list(folder.iterdir())) for folder in shared.iterdir() if "." not in folder.name]


@pytest.fixture(autouse=True)
def empty(shared: Path, bench: Bench) -> Iterator[None]:
    """A test leaves no folder that nobody looks for."""
    for folder in shared.iterdir():
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    yield
    assert [folder for folder in shared.iterdir() if "." in folder.name] == []


def test_a_prompt_is_there_once_all_of_it_is(bench: Bench, shared: Path) -> None:
    bench.add("a", PROMPT)
    flight = bench.start("a", pause_at=IN_THE_MIDDLE)
    assert visible(shared) == []
    bench.add("short", random_prompt(50, seed=8))
    bench.start("short")
    assert visible(shared) == [NUM_LAYERS], "the short one's"
    bench.resume(flight)
    assert visible(shared) == [NUM_LAYERS, NUM_LAYERS]


def test_the_stock_way_shows_it_half_written(
    bench: Bench, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the tests around prove nothing."""
    monkeypatch.setattr(
        f"{WHOLE_FOLDERS['kv_connector_module_path']}.WholeFolders._beside",
        lambda self, folder, request: folder,
    )
    bench.add("a", PROMPT)
    flight = bench.start("a", pause_at=IN_THE_MIDDLE)
    (written,) = visible(shared)
    assert 0 < written < NUM_LAYERS
    bench.abort("a")
    bench.unwind(flight)


def test_a_prefill_that_is_given_up_leaves_nothing(bench: Bench, shared: Path) -> None:
    bench.add("a", PROMPT)
    flight = bench.start("a", pause_at=IN_THE_MIDDLE)
    assert list(shared.iterdir()) != []
    bench.abort("a")
    bench.unwind(flight)
    assert list(shared.iterdir()) == []


def test_what_is_there_gives_the_same_answer(bench: Bench, shared: Path) -> None:
    bench.add("a", PROMPT)
    bench.resume(bench.start("a", pause_at=IN_THE_MIDDLE))
    bench.flush()
    bench.vllm.reset_prefix_cache()
    bench.add("b", PROMPT)
    flight = bench.start("b")
    assert [(m.start, m.end) for m in flight.members] == [(NUM_FOUND, len(PROMPT))]
    assert bench.outputs["b"] == bench.outputs["a"] != []


def test_the_same_prompt_may_overtake_itself(bench: Bench, shared: Path) -> None:
    bench.add("a", PROMPT)
    flight = bench.start("a", pause_at=IN_THE_MIDDLE)
    bench.add("b", PROMPT)
    assert [(m.start, m.end) for m in bench.start("b").members] == [(0, len(PROMPT))]
    assert visible(shared) == [NUM_LAYERS]
    bench.resume(flight)
    assert visible(shared) == [NUM_LAYERS]
    assert bench.outputs["a"] == bench.outputs["b"] != []


def test_a_prompt_in_chunks_is_left_to_decode(bench: Bench, shared: Path) -> None:
    """The stock connector stores all of it with the first chunk, most of it not computed yet."""
    bench.add("a", PROMPT)
    bench.start("a", tokens=160)
    bench.start("a")
    assert list(shared.iterdir()) == []
