"""Accounting of KV blocks: who holds which, and which hold a prefix that others may reuse.

Rules of this file
1. A block is free, held (one reference per request that holds it), or evictable: cached and held by nobody.
2. A block enters the prefix cache by `commit` alone, called when the task that computed it has completed. Before
   that its content is not there, and a reader would compute from garbage.
3. A hash names one block. A commit that finds its hash cached keeps the first block; the second stays private.
4. Blocks leave the cache only by eviction, least recently used first, a chain's tail before its head.

Nothing here touches memory: an engine owns the bytes behind block ids. Not thread-safe; one thread owns a pool.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Protocol

import numpy as np


def prefix_hashes(
    token_ids: Sequence[int], block_size: int, *, salt: Sequence[str | int] = ()
) -> tuple[int, ...]:
    """One hash per full block, each covering the block and everything before it.

    Unsigned 64-bit integers, equal in every process and on every machine. `salt` keeps caches apart that must
    not share (a model revision, a tenant): hashes of different salts never meet.
    """
    state = blake2b(digest_size=16)
    for part in salt:
        encoded = f"{type(part).__name__}:{part}".encode()
        state.update(len(encoded).to_bytes(4, "little") + encoded)
    data = np.asarray(token_ids, dtype="<i8").tobytes()
    width = block_size * 8
    hashes = []
    for end in range(width, len(data) + 1, width):
        state.update(data[end - width : end])
        hashes.append(int.from_bytes(state.digest()[:8], "little"))
    return tuple(hashes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Blocks of one request in prompt order; KV of the first `num_cached_tokens` tokens is in place."""

    block_ids: tuple[int, ...]
    num_cached_tokens: int


class KVAccounting(Protocol):
    """What a scheduler asks of whoever keeps account of KV blocks: `KVCachePool`, or an engine that allocates itself."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def num_free(self) -> int:
        """Blocks an allocation may take: free ones and evictable ones."""
        ...

    @property
    def cache_version(self) -> int:
        """Grows whenever the set of cached hashes changes; equal versions give equal matches."""
        ...

    def block_ids(self, request_id: str) -> tuple[int, ...]:
        """The request's blocks in order; empty when it holds none, or when they are nobody's business."""
        ...

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one request take, rounded up."""
        ...

    def match(self, prefix_hashes: Sequence[int], num_tokens: int) -> int:
        """Tokens of a prompt whose KV is cached: whole blocks, and at least one token is left to compute."""
        ...

    def shortage(self, num_tokens: int, prefix_hashes: Sequence[int] = ()) -> int:
        """Blocks that are missing for this allocation; zero or less when it fits."""
        ...

    def reclaimable(self, request_ids: Iterable[str]) -> int:
        """Blocks that nobody would hold any more if these requests released theirs."""
        ...

    def allocate(
        self, request_id: str, num_tokens: int, prefix_hashes: Sequence[int] = ()
    ) -> Allocation | None:
        """Blocks for `num_tokens` tokens, starting with what the cache has; None, and no change, when short."""
        ...

    def commit(self, request_id: str, num_computed_tokens: int) -> tuple[int, ...]:
        """KV of the request's first `num_computed_tokens` tokens is in place. Returns the hashes that hit from now on."""
        ...

    def release(self, request_id: str) -> int:
        """Give the request's blocks back; how many nobody holds any more. Zero when it holds none."""
        ...


@dataclass(slots=True, kw_only=True)
class _Holding:
    block_ids: list[int]
    hashes: tuple[int, ...]
    committed: int = field(default=0)  # blocks from the front that commit has dealt with


class KVCachePool:
    """A fixed number of KV blocks, shared by reference count, with an LRU prefix cache.

    `commit_on_allocate=True` breaks rule 2 on purpose, so that a test can show what the rule prevents.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        commit_on_allocate: bool = False,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a pool has at least 1 block")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; a block holds at least 1 token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._commit_on_allocate = commit_on_allocate
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest id is taken first
        self._references = [0] * num_blocks
        self._hash_of: list[int | None] = [None] * num_blocks
        self._block_of: OrderedDict[int, int] = OrderedDict()  # hash -> block, least recently used first
        self._evictable: OrderedDict[int, None] = OrderedDict()  # block ids, next to be evicted first
        self._holdings: dict[str, _Holding] = {}
        self._cache_version = 0

    @property
    def num_free(self) -> int:
        """Blocks an allocation may take: free ones and evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def cache_version(self) -> int:
        """Grows whenever the set of cached hashes changes; equal versions give equal matches."""
        return self._cache_version

    def holds(self, request_id: str) -> bool:
        return request_id in self._holdings

    def block_ids(self, request_id: str) -> tuple[int, ...]:
        """The request's blocks in order; empty when it holds none."""
        holding = self._holdings.get(request_id)
        return tuple(holding.block_ids) if holding is not None else ()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one request take, rounded up."""
        return -(-num_tokens // self.block_size)

    def match(self, prefix_hashes: Sequence[int], num_tokens: int) -> int:
        """Tokens of a prompt whose KV is cached: whole blocks, and at least one token is left to compute."""
        return self._num_matching(prefix_hashes, num_tokens) * self.block_size

    def can_allocate(self, num_tokens: int, prefix_hashes: Sequence[int] = ()) -> bool:
        """Whether `allocate` would succeed now. Changes nothing."""
        return self.shortage(num_tokens, prefix_hashes) <= 0

    def shortage(self, num_tokens: int, prefix_hashes: Sequence[int] = ()) -> int:
        """Blocks that are missing for this allocation; zero or less when it fits."""
        matching = self._num_matching(prefix_hashes, num_tokens)
        blocks = (self._block_of[prefix_hashes[index]] for index in range(matching))
        revived = sum(1 for block in blocks if self._references[block] == 0)
        return self.num_blocks_for(num_tokens) - matching - (self.num_free - revived)

    def reclaimable(self, request_ids: Iterable[str]) -> int:
        """Blocks that nobody would hold any more if these requests released theirs."""
        references: Counter[int] = Counter()
        for request_id in request_ids:
            holding = self._holdings.get(request_id)
            if holding is not None:
                references.update(holding.block_ids)
        return sum(1 for block, count in references.items() if self._references[block] == count)

    def allocate(
        self, request_id: str, num_tokens: int, prefix_hashes: Sequence[int] = ()
    ) -> Allocation | None:
        """Blocks for `num_tokens` tokens, starting with what the cache has; None, and no change, when short.

        `prefix_hashes` are kept for `commit`. Raises ValueError when the request holds blocks already.
        """
        if request_id in self._holdings:
            raise ValueError(f"request {request_id!r} holds blocks already; release them first")
        if num_tokens < 1:
            raise ValueError(f"num_tokens is {num_tokens}; an allocation covers at least 1 token")
        if not self.can_allocate(num_tokens, prefix_hashes):
            return None
        matching = self._num_matching(prefix_hashes, num_tokens)
        blocks = []
        for value in prefix_hashes[:matching]:
            block = self._block_of[value]
            self._references[block] += 1
            self._evictable.pop(block, None)
            self._block_of.move_to_end(value)
            blocks.append(block)
        blocks.extend(self._take() for _ in range(self.num_blocks_for(num_tokens) - matching))
        self._holdings[request_id] = _Holding(
            block_ids=blocks, hashes=tuple(prefix_hashes), committed=matching
        )
        if self._commit_on_allocate:
            self.commit(request_id, num_tokens)
        return Allocation(block_ids=tuple(blocks), num_cached_tokens=matching * self.block_size)

    def extend(self, request_id: str, num_tokens: int) -> tuple[int, ...] | None:
        """Grow the request's blocks to cover `num_tokens` tokens in all; the added ids, None when short.

        A request that covers them already gets an empty tuple. Raises KeyError when it holds no blocks.
        """
        holding = self._holdings[request_id]
        missing = self.num_blocks_for(num_tokens) - len(holding.block_ids)
        if missing > self.num_free:
            return None
        added = tuple(self._take() for _ in range(missing))
        holding.block_ids.extend(added)
        return added

    def commit(self, request_id: str, num_computed_tokens: int) -> tuple[int, ...]:
        """KV of the request's first `num_computed_tokens` tokens is in place: its full blocks may be reused.

        Returns the hashes that hit from now on and did not before. Raises KeyError when the request holds no blocks.
        """
        holding = self._holdings[request_id]
        if not self.prefix_caching:
            return ()
        entered = []
        full = min(num_computed_tokens // self.block_size, len(holding.hashes), len(holding.block_ids))
        for index in range(holding.committed, full):
            value, block = holding.hashes[index], holding.block_ids[index]
            if value not in self._block_of:
                self._block_of[value] = block
                self._hash_of[block] = value
                self._cache_version += 1
                entered.append(value)
        holding.committed = max(holding.committed, full)
        return tuple(entered)

    def release(self, request_id: str) -> int:
        """Give the request's blocks back; how many nobody holds any more. Zero when it holds none."""
        holding = self._holdings.pop(request_id, None)
        if holding is None:
            return 0
        released = 0
        for block in reversed(holding.block_ids):  # the tail becomes evictable before the head it hangs on
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was released more often than taken"
            if self._references[block] > 0:
                continue
            released += 1
            if self._hash_of[block] is None:
                self._free.append(block)
            else:
                self._evictable[block] = None
        return released

    def cached_hashes(self, limit: int) -> tuple[int, ...]:
        """At most `limit` hashes that would hit now, most recently used or committed first."""
        return tuple(islice(reversed(self._block_of), limit))

    def _num_matching(self, prefix_hashes: Sequence[int], num_tokens: int) -> int:
        if not self.prefix_caching:
            return 0
        most = min(len(prefix_hashes), (num_tokens - 1) // self.block_size)
        matching = 0
        while matching < most and prefix_hashes[matching] in self._block_of:
            matching += 1
        return matching

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            value = self._hash_of[block]
            assert value is not None, f"block {block} is evictable but not cached"
            del self._block_of[value]
            self._hash_of[block] = None
            self._cache_version += 1
        self._references[block] = 1
        return block
