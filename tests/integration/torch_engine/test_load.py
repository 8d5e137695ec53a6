"""What loading decides: tiles from measured costs, the dtype, limits, and what it says of itself."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402 - what follows needs torch

from flowprefill.engines.protocol import DecodeSequence, PrefillItem, SamplingParams
from flowprefill.engines.torch_engine import TorchEngine
from flowprefill.engines.torch_engine.calibrate import point_times
from flowprefill.engines.torch_engine.layout import Tiles
from support.embedded_model import embedded_model
from support.tiny_models import tiny_model
from support.torch_runs import OpenGate, item

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def path() -> Path:
    return tiny_model("llama")


def test_it_says_what_it_loaded(path: Path) -> None:
    engine = TorchEngine.load(
        path, dtype="bfloat16", kv_cache_tokens=130, block_size=16, model="served", revision="r1"
    )
    spec = engine.spec
    assert (spec.engine, spec.model, spec.revision, spec.device) == ("torch", "served", "r1", "cpu")
    assert (spec.dtype, spec.num_layers, spec.num_kv_heads, spec.head_dim) == ("bfloat16", 2, 2, 8)
    assert spec.num_kv_blocks == 9  # 130 tokens, rounded up to blocks
    assert (
        spec.kv_block_bytes == 2 * 2 * 16 * 2 * 8 * 2
    )  # layers, keys and values, tokens, heads, width, bytes
    assert spec.max_model_len == 130  # more does not fit the pool
    assert spec.eos_token_ids == (2,)
    engine.close()


def test_a_smaller_gap_and_a_tile_limit_cut_finer(path: Path) -> None:
    limits = {}
    for name, options in {
        "none": {"max_gap_s": None},
        "long": {"max_gap_s": 0.05},
        "short": {"max_gap_s": 0.0005},
        "limited": {"max_gap_s": 0.05, "tile_tokens": 48},
    }.items():
        engine = TorchEngine.load(path, dtype="float32", kv_cache_tokens=512, **options)
        limits[name] = engine.tiles
        engine.close()
    assert limits["none"] == Tiles()
    assert limits["long"].rows >= limits["short"].rows
    assert limits["long"].attention_pairs > limits["short"].attention_pairs
    assert limits["limited"].rows == 48


def test_auto_times_both_types_and_says_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine = TorchEngine.load(path, kv_cache_tokens=256)
    [record] = [record for record in caplog.records if "dtype" in record.getMessage()]
    times = {"bfloat16": record.bfloat16_seconds, "float32": record.float32_seconds}
    assert engine.spec.dtype == record.dtype
    assert all(seconds > 0 for seconds in times.values())
    if times["bfloat16"] * 2 < times["float32"] or times["float32"] < times["bfloat16"]:
        assert engine.spec.dtype == min(times, key=lambda name: times[name])
    assert engine.model.dtype == getattr(torch, record.dtype)
    engine.close()


@pytest.mark.model
def test_the_share_of_work_follows_the_cpu_time_spent() -> None:
    """Within one run; 0.1 is several times what was seen on a busy machine."""
    engine = TorchEngine.load(embedded_model(), dtype="float32", kv_cache_tokens=512)
    engine.tiles = Tiles(rows=128)
    item_rows = 384
    times = point_times(engine, item_rows)
    plan = engine.plan_prefill([item(engine, [1] * item_rows)], "operator")
    assert len(times) == plan.num_points + 1
    for index in range(plan.num_points):
        assert plan.work_done(index) == pytest.approx(times[index] / times[-1], abs=0.1)
    engine.close()


def test_items_without_tokens_or_blocks_are_refused(path: Path) -> None:
    engine = TorchEngine.load(path, dtype="float32", kv_cache_tokens=256)
    with pytest.raises(ValueError, match="at least 1"):
        engine.plan_prefill(
            [PrefillItem(request_id="r", token_ids=[], start=0, block_ids=[0], sample=True)], "operator"
        )
    with pytest.raises(ValueError, match="needed are 3"):
        engine.plan_prefill(
            [PrefillItem(request_id="r", token_ids=[1] * 10, start=32, block_ids=[0, 1], sample=True)],
            "operator",
        )
    step = DecodeSequence(
        request_id="r", last_token_id=1, position=16, block_ids=[0], sampling=SamplingParams(temperature=0.0)
    )
    with pytest.raises(ValueError, match="needed are 2"):
        engine.plan_decode([step])
    engine.close()


def test_blocks_of_the_wrong_size_or_number_are_refused(path: Path) -> None:
    engine = TorchEngine.load(path, dtype="float32", kv_cache_tokens=256)
    data = engine.read_blocks([3, 1])
    engine.write_blocks([0, 2], data)
    assert engine.read_blocks([0, 2]) == data
    with pytest.raises(ValueError, match="accepted are exactly"):
        engine.write_blocks([0], data)
    with pytest.raises(ValueError, match="block id 16"):
        engine.read_blocks([16])
    assert engine.read_blocks([]).nbytes == 0
    engine.close()


def test_an_error_in_the_model_leaves_the_engine_working(path: Path) -> None:
    engine = TorchEngine.load(path, dtype="float32", kv_cache_tokens=256)
    good = engine.plan_prefill([item(engine, [1, 2, 3])], "operator")
    before = engine.run(good, OpenGate())
    with pytest.raises(IndexError):
        engine.run(engine.plan_prefill([item(engine, [1, 10_000])], "operator"), OpenGate())
    assert engine.run(good, OpenGate()) == before
    engine.close()
