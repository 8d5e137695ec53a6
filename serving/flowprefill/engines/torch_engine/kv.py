"""The paged pool of keys and values. Block accounting is the scheduler's; this is only the memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowprefill.engines.kv_size import check_kv_fits, too_large
from flowprefill.errors import InvalidConfiguration

MAX_RUNS = 4

Places = Tensor | tuple[tuple[int, int, int], ...]
"""Slots of each row [R], or runs (first slot, first row, rows)."""


class PagedKV:
    """One tensor `[layer, 2, block, block_size, kv_heads, head_dim]` for all requests of an engine.

    Raises `InvalidConfiguration` when there is no memory for it.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        num_bytes, num_tokens = math.prod(shape) * dtype.itemsize, num_blocks * block_size
        if device.type == "cpu":
            check_kv_fits(num_bytes, num_tokens)
        try:
            # A CPU takes zeroed pages from the kernel only when they are first written.
            self.pool = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # torch has no error of its own for a CPU without memory
            raise InvalidConfiguration(
                too_large(num_bytes, num_tokens, f"{device} has no room for it")
            ) from error
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._blocks = [self.pool[layer] for layer in range(num_layers)]  # [2, block, block_size, KH, hd]
        self._slots = [
            (keys.view(-1, num_kv_heads, head_dim), values.view(-1, num_kv_heads, head_dim))
            for keys, values in self._blocks
        ]

    @property
    def block_bytes(self) -> int:
        """Size of one block over all layers, keys and values."""
        return self.pool[:, :, 0].numel() * self.pool.element_size() if self.num_blocks else 0

    def write(self, layer: int, places: Places, keys: Tensor, values: Tensor) -> None:
        """Store `[KH, R, hd]` keys and values at their places."""
        flat_keys, flat_values = self._slots[layer]
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        if isinstance(places, Tensor):
            flat_keys.index_copy_(0, places, keys)
            flat_values.index_copy_(0, places, values)
            return
        for slot, row, count in places:
            flat_keys[slot : slot + count] = keys[row : row + count]
            flat_values[slot : slot + count] = values[row : row + count]

    def places(self, slots: NDArray[np.int64]) -> Places:
        """Where rows go: few runs of neighbouring slots when there are any, since plain copies cost a fifth of scattered ones."""
        starts = np.flatnonzero(np.diff(slots, prepend=slots[0] - 2) != 1)
        if len(starts) > MAX_RUNS:
            return torch.from_numpy(slots).to(self.pool.device)
        lengths = np.diff(starts, append=len(slots))
        return tuple(zip(slots[starts].tolist(), starts.tolist(), lengths.tolist(), strict=True))

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of `blocks` [N] in order, each `[KH, N * block_size, hd]` (strided views of one copy)."""
        pages = self._blocks[layer].index_select(1, blocks)  # [2, N, block_size, KH, hd]
        keys, values = pages.flatten(1, 2).transpose(1, 2)  # [KH, N * block_size, hd] each
        return keys, values

    def read(self, block_ids: Sequence[int]) -> memoryview:
        """A copy of these blocks' bytes, in this pool's order with the block axis replaced by `block_ids`."""
        if not block_ids:
            return memoryview(b"")
        copy = self.pool.index_select(2, self._index(block_ids)).cpu()
        return copy.view(torch.uint8).numpy().data.cast("B")

    def write_bytes(self, block_ids: Sequence[int], data: memoryview) -> None:
        """Put bytes in `read` order into these blocks. Raises ValueError on a size mismatch."""
        expected = len(block_ids) * self.block_bytes
        if data.nbytes != expected:
            raise ValueError(
                f"{data.nbytes} bytes came for {len(block_ids)} KV blocks; accepted are exactly {expected} "
                f"({self.block_bytes} per block)"
            )
        if not block_ids:
            return
        index = self._index(block_ids)
        shape = (*self.pool.shape[:2], len(block_ids), *self.pool.shape[3:])
        source = torch.frombuffer(bytearray(data.cast("B")), dtype=self.pool.dtype).view(shape)
        self.pool.index_copy_(2, index, source.to(self.pool.device))

    def release(self) -> None:
        """Give the memory back; the pool is not used afterwards."""
        self._blocks, self._slots = [], []
        self.pool = torch.empty(0)

    def _index(self, block_ids: Sequence[int]) -> Tensor:
        bad = [block for block in block_ids if not 0 <= block < self.num_blocks]
        if bad:
            raise ValueError(f"block id {bad[0]} is unknown; accepted are 0 to {self.num_blocks - 1}")
        return torch.tensor(list(block_ids), dtype=torch.int64, device=self.pool.device)
