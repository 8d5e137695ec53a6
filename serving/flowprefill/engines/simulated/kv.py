"""A KV memory whose content shows whether it is right.

For the token at position x the store keeps the token (as "value") and a fingerprint of all tokens up to x (as "key"), just
as a real key depends on everything before it. So a block that was never written, or that holds another prompt's
KV, is found out by whoever reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

DTYPE = "uint64"
WORD_BYTES = 8


class WrongKV(RuntimeError):
    """KV that a batch builds on is missing or belongs to other tokens."""


class MarkerStore:
    """KV of `num_blocks` blocks. Layout: one layer, one head, head dimension 1, 64-bit words; 0 is never written."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._memory: Words = np.zeros((2, num_blocks, block_size), dtype=np.uint64)  # key, value
        self._keys = self._memory[0].reshape(-1)
        self._values = self._memory[1].reshape(-1)

    def check_blocks(self, block_ids: Sequence[int], num_tokens: int) -> None:
        """Raise ValueError unless the blocks exist and hold `num_tokens` tokens."""
        if len(block_ids) * self.block_size < num_tokens:
            raise ValueError(f"{len(block_ids)} blocks of {self.block_size} cannot hold {num_tokens} tokens")
        bad = [block_id for block_id in block_ids if not 0 <= block_id < self.num_blocks]
        if bad:
            raise ValueError(f"block ids {bad} do not exist; accepted are 0 to {self.num_blocks - 1}")

    def clear(self, block_ids: Sequence[int], start: int, end: int) -> None:
        """Forget positions `[start, end)`: they are about to be computed."""
        self._values[self._slots(block_ids, start, end)] = 0

    def verify(self, block_ids: Sequence[int], start: int, end: int, *, whose: str) -> None:
        """Raise `WrongKV` unless positions `[start, end)` hold one unbroken prompt, continuing what is before."""
        slots = self._slots(block_ids, start, end)
        stored = self._values[slots]
        missing = np.flatnonzero(stored == 0)
        if missing.size:
            raise WrongKV(
                f"request {whose} builds on KV that is not there: position {start + int(missing[0])} of {end}"
            )
        expected = fingerprints(stored - np.uint64(1), start, self._key_before(block_ids, start))
        wrong = np.flatnonzero(self._keys[slots] != expected)
        if wrong.size:
            raise WrongKV(
                f"request {whose} builds on KV of other tokens: position {start + int(wrong[0])} of {end}"
            )

    def write(self, block_ids: Sequence[int], token_ids: Sequence[int], start: int) -> int:
        """Write the KV of `token_ids` at `[start, ...)`. Returns the last fingerprint."""
        before = self._key_before(block_ids, start)
        tokens = np.asarray(token_ids, dtype=np.uint64)
        slots = self._slots(block_ids, start, start + len(tokens))
        keys = fingerprints(tokens, start, before)
        self._keys[slots] = keys
        self._values[slots] = tokens + np.uint64(1)
        return int(keys[-1])

    def read(self, block_ids: Sequence[int]) -> memoryview:
        """A copy of these blocks, `[1, 2, block, block_size, 1, 1]`."""
        return memoryview(self._memory[:, list(block_ids), :].tobytes())

    def put(self, block_ids: Sequence[int], data: memoryview) -> None:
        """Write what `read` gave into these blocks. Raises ValueError on a size mismatch."""
        accepted = 2 * len(block_ids) * self.block_size * WORD_BYTES
        if data.nbytes != accepted:
            raise ValueError(
                f"{data.nbytes} bytes do not fill {len(block_ids)} blocks; accepted are {accepted}"
            )
        words = np.frombuffer(data, dtype=np.uint64).reshape(2, len(block_ids), self.block_size)
        self._memory[:, list(block_ids), :] = words

    def _key_before(self, block_ids: Sequence[int], position: int) -> int:
        return int(self._keys[self._slots(block_ids, position - 1, position)][0]) if position else 0

    def _slots(self, block_ids: Sequence[int], start: int, end: int) -> NDArray[np.int64]:
        positions = np.arange(start, end)
        blocks = np.asarray(block_ids, dtype=np.int64)
        slots: NDArray[np.int64] = blocks[positions // self.block_size] * self.block_size
        return slots + positions % self.block_size


def fingerprints(token_ids: Words, start: int, before: int = 0) -> Words:
    """For each token, the fingerprint of all tokens up to it; `before` is the one at `start - 1`."""
    positions = np.arange(start, start + len(token_ids), dtype=np.uint64)
    mixed = _mix(token_ids * np.uint64(0x9E3779B97F4A7C15) + positions)
    mixed[:1] += np.uint64(before)
    return np.cumsum(mixed, dtype=np.uint64)


def next_token(fingerprint: int, vocab_size: int, salt: int = 0) -> int:
    """The token that the simulated model puts after a prompt with this fingerprint."""
    return int(_mix(np.array([(fingerprint + salt) % 2**64], dtype=np.uint64))[0] % np.uint64(vocab_size))


def _mix(words: Words) -> Words:
    """Bijective scrambling of 64-bit words (the finalizer of splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
