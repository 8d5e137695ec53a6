"""Attention over tiles of query rows, by the backend's own kernel.

vLLM writes a layer's keys and values before it attends. So a tile of query rows is attention as of a later chunk of the prompt: the same
kernel, fewer queries, a shorter sequence. The metadata of each tile is made by the backend's own builder, once per step, and hangs on the
step's metadata; the layer's `impl.forward` runs tile by tile, with a preemption point between. Inside vLLM's attention
operator, so it is the same for compiled models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from flowprefill.engines.vllm_engine.stint import Stage
from flowprefill.engines.vllm_engine.tiles import Segment, attention_tiles

BUILDERS = ("CPUAttentionMetadataBuilder",)
"""Metadata builders that keep nothing between two builds, so that several can be made for one step."""

_TILES = "preemption_tiles"


@dataclass(frozen=True, slots=True)
class _Tile:
    start: int
    end: int
    metadata: Any


def build_tiles(builders: Iterable[Any], stage: Stage) -> None:
    """Have these metadata builders make tiles of long batches too."""
    for builder in builders:
        if type(builder).__name__ in BUILDERS:
            _wrap_builder(builder, stage)


def attend_in_tiles(model: nn.Module, stage: Stage) -> None:
    """Have the model's attention layers run over a step's tiles, where it has some."""
    for module in model.modules():
        impl = getattr(module, "impl", None)
        if isinstance(module, AttentionLayerBase) and impl is not None:
            _wrap_impl(impl, stage)


def _wrap_builder(builder: Any, stage: Stage) -> None:
    build = builder.build

    def build_with_tiles(common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        limits, common = stage.limits, common_attn_metadata
        lengths = common.seq_lens_cpu_upper_bound
        if limits is None or stage.stint is None or lengths is None or common.causal is not True:
            return metadata
        news = common.query_start_loc_cpu.diff().tolist()
        tiles = attention_tiles(list(zip(news, lengths.tolist(), strict=True)), limits)
        if len(tiles) > 1:
            made = [
                _Tile(tile[0].start, tile[-1].end, build(0, _common_of(common, tile), *args, **kwargs))
                for tile in tiles
            ]
            setattr(metadata, _TILES, made)
        return metadata

    builder.build = build_with_tiles


def _common_of(common: Any, tile: Sequence[Segment]) -> Any:
    """The step's metadata cut down to a tile: rows of consecutive requests."""
    first, last = tile[0].request, tile[-1].request + 1
    start, end = tile[0].start, tile[-1].end
    device = common.seq_lens.device
    starts = [segment.start - start for segment in tile] + [end - start]
    query_start_loc = torch.tensor(starts, dtype=common.query_start_loc_cpu.dtype)
    seq_lens = torch.tensor([segment.seq_len for segment in tile], dtype=common.seq_lens.dtype)
    return replace(
        common,
        query_start_loc=query_start_loc.to(device),
        query_start_loc_cpu=query_start_loc,
        seq_lens=seq_lens.to(device),
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(tile),
        num_actual_tokens=end - start,
        max_query_len=max(segment.end - segment.start for segment in tile),
        max_seq_len=max(segment.seq_len for segment in tile),
        block_table_tensor=common.block_table_tensor[first:last],
        slot_mapping=common.slot_mapping[start:end],
        positions=None if common.positions is None else common.positions[start:end],
        is_prefilling=None if common.is_prefilling is None else common.is_prefilling[first:last],
        req_idx=None if common.req_idx is None else common.req_idx[first:last],
        logits_indices_padded=None,
        num_logits_indices=None,
    )


def _wrap_impl(impl: Any, stage: Stage) -> None:
    forward = impl.forward

    def forward_in_tiles(
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        tiles: Sequence[_Tile] | None = getattr(attn_metadata, _TILES, None)
        stint = stage.stint
        if tiles is None or stint is None:
            whole: torch.Tensor = forward(
                layer, query, key, value, kv_cache, attn_metadata, output=output, **kwargs
            )
            return whole
        for number, tile in enumerate(tiles):
            rows = slice(tile.start, tile.end)
            forward(
                layer,
                query[rows],
                key[rows],
                value[rows],
                kv_cache,
                tile.metadata,
                output=output[rows],
                **kwargs,
            )
            if stint.granularity == "operator" and number < len(tiles) - 1:
                stint.point()
        return output

    impl.forward = forward_in_tiles
