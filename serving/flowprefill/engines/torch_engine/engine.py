"""The torch engine: implements `flowprefill.engines.protocol.Engine` for any causal LM of transformers."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowprefill.engines.protocol import DecodeSequence, EngineSpec, Gate, Plan, PrefillItem
from flowprefill.engines.torch_engine.agreement import check_agreement
from flowprefill.engines.torch_engine.calibrate import measure
from flowprefill.engines.torch_engine.choose_dtype import choose
from flowprefill.engines.torch_engine.costs import Costs, choose_tiles, from_flops
from flowprefill.engines.torch_engine.instrument import instrument
from flowprefill.engines.torch_engine.kv import PagedKV, Places
from flowprefill.engines.torch_engine.layout import ItemShape, Tiles
from flowprefill.engines.torch_engine.loading import LoadedModel, load_model, read_config
from flowprefill.engines.torch_engine.plan import TorchPlan
from flowprefill.engines.torch_engine.run_state import RunState
from flowprefill.engines.torch_engine.sampling import first_tokens, sample
from flowprefill.engines.torch_engine.threads import thread_context, use_threads
from flowprefill.engines.window import LaunchWindow
from flowprefill.errors import InvalidConfiguration, ModelNotLoadable
from flowprefill.scheduling.actions import Granularity

logger = logging.getLogger(__name__)

DEFAULT_FLOPS_PER_S = {"cpu": 5e10, "cuda": 1e14}
"""Assumed until measured; only the proportions between operators matter then."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchEngine:
    """A loaded model. Build one with `TorchEngine.load`."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        model: str,
        revision: str,
        num_kv_blocks: int,
        block_size: int,
        max_model_len: int,
        tiles: Tiles,
        threads: int = 1,
        lookahead: int = 3,
    ) -> None:
        self.model: Any = loaded.model
        self._decoder: Any = loaded.model.get_decoder()
        self._runtime = loaded.runtime
        self.trace = loaded.trace
        self._threads = threads
        parameter = next(loaded.model.parameters())
        self._device: torch.device = parameter.device
        is_cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._lookahead = lookahead
        self._random = random.Random()
        self._kv = PagedKV(
            num_layers=len(loaded.trace.layers),
            num_blocks=num_kv_blocks,
            block_size=block_size,
            num_kv_heads=loaded.trace.num_kv_heads,
            head_dim=loaded.trace.head_dim,
            dtype=parameter.dtype,
            device=self._device,
        )
        self.costs: Costs = from_flops(loaded.trace, DEFAULT_FLOPS_PER_S[self._device.type])
        self.tiles = tiles
        self._spec = EngineSpec(
            engine="torch",
            model=model,
            revision=revision,
            device=str(self._device),
            dtype=str(parameter.dtype).removeprefix("torch."),
            max_model_len=max_model_len,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            num_layers=len(loaded.trace.layers),
            num_kv_heads=loaded.trace.num_kv_heads,
            head_dim=loaded.trace.head_dim,
            kv_block_bytes=self._kv.block_bytes,
            vocab_size=loaded.model.config.vocab_size,
            eos_token_ids=eos_token_ids(loaded.model),
        )
        instrument(loaded.layers, loaded.linears, loaded.runtime, heads=loaded.heads)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        kv_cache_tokens: int,
        block_size: int = 16,
        threads: int = 1,
        max_gap_s: float | None = 0.02,
        tile_tokens: int | None = None,
        max_model_len: int | None = None,
        model: str | None = None,
        revision: str = "",
        lookahead: int = 3,
    ) -> TorchEngine:
        """Load the model in directory `path` and size its tiles for this machine.

        `kv_cache_tokens` bounds the KV pool, rounded up to whole blocks of `block_size`. `max_gap_s` bounds the time
        between two preemption points (None: operators are not cut) and `tile_tokens` the token rows of an operator
        besides. Raises ModelNotLoadable or InvalidConfiguration.
        """
        path = Path(path)
        use_threads(threads)
        config = read_config(path)
        loaded = load_model(path, config, _dtype(dtype), torch.device(device))
        if dtype == "auto":
            loaded.model.to(choose(loaded))
        limit = getattr(config, "max_position_embeddings", None) or kv_cache_tokens
        engine = cls(
            loaded,
            model=model or path.name,
            revision=revision,
            num_kv_blocks=-(-kv_cache_tokens // block_size),
            block_size=block_size,
            max_model_len=min(limit, max_model_len or limit, kv_cache_tokens),
            tiles=Tiles(),
            threads=threads,
            lookahead=lookahead,
        )
        with engine.thread_context():
            check_agreement(engine)
            engine.costs = measure(engine)
        tiles = choose_tiles(loaded.trace, engine.costs, max_gap_s)
        if tile_tokens is not None:
            tiles = replace(tiles, rows=min(tile_tokens, tiles.rows or tile_tokens))
        engine.tiles = tiles
        logger.info(
            "torch engine ready",
            extra={
                "model": engine.spec.model,
                "dtype": engine.spec.dtype,
                "device": engine.spec.device,
                "tile_rows": engine.tiles.rows,
                "attention_pairs": engine.tiles.attention_pairs,
            },
        )
        return engine

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    def thread_context(self) -> AbstractContextManager[object]:
        """Inference mode, thread count, device and stream, for a thread that plans and runs."""
        return thread_context(self._device, self._stream, self._threads)

    def plan_prefill(self, items: Sequence[PrefillItem], granularity: Granularity) -> TorchPlan:
        """Lay out a packed batch. Raises ValueError when an item is empty or lacks blocks."""
        for item in items:
            if not item.token_ids:
                raise ValueError(f"request {item.request_id} has no tokens to run; an item has at least 1")
            self._check_blocks(item.request_id, item.block_ids, item.start + len(item.token_ids))
        shapes = tuple(
            ItemShape(start=item.start, num_rows=len(item.token_ids), sample=item.sample) for item in items
        )
        return self._plan(items, shapes, granularity)

    def plan_decode(self, sequences: Sequence[DecodeSequence]) -> TorchPlan:
        """Lay out one decode step: one row per sequence. Raises ValueError when a sequence lacks blocks."""
        for sequence in sequences:
            self._check_blocks(sequence.request_id, sequence.block_ids, sequence.position + 1)
        shapes = tuple(ItemShape(start=sequence.position, num_rows=1, sample=True) for sequence in sequences)
        return self._plan(sequences, shapes, "operator")

    def _check_blocks(self, request_id: str, block_ids: Sequence[int], num_positions: int) -> None:
        needed = -(-num_positions // self._kv.block_size)
        if len(block_ids) < needed:
            raise ValueError(
                f"request {request_id} has {len(block_ids)} blocks for {num_positions} positions; needed are {needed}"
            )

    def _plan(
        self,
        items: Sequence[PrefillItem | DecodeSequence],
        shapes: tuple[ItemShape, ...],
        granularity: Granularity,
    ) -> TorchPlan:
        return TorchPlan(
            items=items,
            shapes=shapes,
            granularity=granularity,
            limits=self.tiles,
            trace=self.trace,
            costs=self.costs,
        )

    def run(self, plan: Plan, gate: Gate) -> Sequence[int | None]:
        """Run `plan`, one of this engine's, to its end in the calling thread; see the protocol."""
        assert isinstance(plan, TorchPlan), "an engine runs only its own plans"
        logits = self.forward(plan, gate)
        if logits is None:
            return [None] * len(plan.items)
        with torch.inference_mode():
            if isinstance(plan.items[0], DecodeSequence):
                return sample(
                    logits, [item for item in plan.items if isinstance(item, DecodeSequence)], self._random
                )
            samplings = [
                item.sampling for item in plan.items if isinstance(item, PrefillItem) and item.sample
            ]
            tokens = iter(first_tokens(logits, samplings, self._random))
        return [next(tokens) if shape.sample else None for shape in plan.shapes]

    def forward(self, plan: TorchPlan, gate: Gate) -> Tensor | None:
        """As `run`, but returns the logits `[S, V]` of the sampled rows in item order, None when there are none."""
        runtime = self._runtime
        with self.thread_context():
            ids, positions, places, tables = self._inputs(plan)
            state = RunState(
                runtime=runtime,
                kv=self._kv,
                plan=plan,
                gate=gate,
                places=places,
                block_tables=tables,
                sampled=self._sampled_rows(plan),
                window=self._launch_window(),
            )
            runtime.active = state
            try:
                # Without a sampled row the head would run on nothing.
                target = self.model if plan.num_sampled else self._decoder
                output = target(input_ids=ids, position_ids=positions, use_cache=False)
            finally:
                # A parked task is unwound while another one is active: that one stays.
                if runtime.active is state:
                    runtime.active = None
            if state.index != plan.num_points:
                raise ModelNotLoadable(
                    f"a run passed {state.index} preemption points where its plan has {plan.num_points}; "
                    f"{type(self.model).__name__} does not run the same operators every time"
                )
            if not plan.num_sampled:
                return None
            logits: Tensor = output.logits[0]
            return logits

    def _inputs(self, plan: TorchPlan) -> tuple[Tensor, Tensor, tuple[Places, ...], list[Tensor]]:
        """Token ids and positions [1, T], where each tile's keys and values go, and each item's block table."""
        size = self._kv.block_size
        ids: list[np.ndarray[Any, Any]] = []
        positions: list[np.ndarray[Any, Any]] = []
        slots: list[np.ndarray[Any, Any]] = []
        tables: list[Tensor] = []
        for item, shape in zip(plan.items, plan.shapes, strict=True):
            tokens = item.token_ids if isinstance(item, PrefillItem) else [item.last_token_id]
            where = np.arange(shape.start, shape.start + shape.num_rows)
            blocks = np.asarray(item.block_ids, dtype=np.int64)
            ids.append(np.asarray(tokens, dtype=np.int64))
            positions.append(where)
            slots.append(blocks[where // size] * size + where % size)
            tables.append(torch.from_numpy(blocks).to(self._device))
        all_slots = np.concatenate(slots)
        return (
            torch.from_numpy(np.concatenate(ids)).unsqueeze(0).to(self._device),
            torch.from_numpy(np.concatenate(positions)).unsqueeze(0).to(self._device),
            tuple(self._kv.places(all_slots[tile.start : tile.end]) for tile in plan.tiles),
            tables,
        )

    def _sampled_rows(self, plan: TorchPlan) -> Tensor:
        ends = np.cumsum([shape.num_rows for shape in plan.shapes])
        rows = [end - 1 for end, shape in zip(ends, plan.shapes, strict=True) if shape.sample]
        return torch.tensor(rows, dtype=torch.int64, device=self._device)

    def _launch_window(self) -> LaunchWindow | None:
        return None if self._stream is None else LaunchWindow(torch.cuda.Event, self._lookahead)

    def synchronize(self) -> None:
        """Wait until the device has done all that was launched. A CPU has."""
        if self._stream is not None:
            self._stream.synchronize()

    def read_blocks(self, block_ids: Sequence[int]) -> memoryview:
        with torch.inference_mode():
            return self._kv.read(block_ids)

    def write_blocks(self, block_ids: Sequence[int], data: memoryview) -> None:
        with torch.inference_mode():
            self._kv.write_bytes(block_ids, data)

    def close(self) -> None:
        """Drop the model and the pool."""
        self.model = self._decoder = None
        self._kv.release()
        gc.collect()  # wrapped modules and their wrappers refer to each other


def eos_token_ids(model: Any) -> tuple[int, ...]:
    """Ids that end an answer: the generation configuration's, else the model configuration's."""
    for config in (getattr(model, "generation_config", None), model.config):
        eos = getattr(config, "eos_token_id", None)
        if isinstance(eos, int):
            return (eos,)
        if eos:
            return tuple(eos)
    return ()


def _dtype(name: str) -> torch.dtype | str:
    """The type to load weights in; "auto" is the type they are stored in, until both have been timed."""
    if name == "auto":
        return name
    if name not in DTYPES:
        raise InvalidConfiguration(f"dtype is {name!r}; accepted are auto, {', '.join(DTYPES)}")
    return DTYPES[name]
