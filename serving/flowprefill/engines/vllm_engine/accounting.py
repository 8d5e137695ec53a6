"""vLLM's KV blocks as our scheduler sees them; implements `scheduling.kv.KVAccounting`.

Our scheduler takes a prompt's blocks in one go when it submits the first chunk; vLLM allocates chunk by chunk. So an allocation here is
a promise: blocks that vLLM has not handed out yet are held back from everybody else, and the promise shrinks as it does.
Hashes are vLLM's own block hashes, as integers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from flowprefill.engines.vllm_engine.scheduler import AllocatingScheduler
from flowprefill.errors import InvalidConfiguration
from flowprefill.scheduling.kv import Allocation

_GROUP = 0


def as_int(block_hash: bytes) -> int:
    """A block hash of vLLM as our scheduler carries it."""
    return int.from_bytes(b"\x01" + block_hash, "big")


def as_hash(value: int) -> bytes:
    """The block hash of vLLM that `as_int` made this of."""
    return value.to_bytes((value.bit_length() + 7) // 8, "big")[1:]


class BlockAccounting:
    """Counts over the scheduler's block pool. Owned by the engine core's thread."""

    def __init__(
        self, scheduler: AllocatingScheduler, vllm_id: Callable[[str], str] = lambda request_id: request_id
    ) -> None:
        """`vllm_id` gives vLLM's id of a request of our scheduler.

        Raises InvalidConfiguration for a model whose layers do not all cache every token."""
        groups = scheduler.kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise InvalidConfiguration(
                f"the model's layers cache KV in {len(groups)} different ways; accepted is 1: all layers with full attention"
            )
        self._vllm_id = vllm_id
        self._scheduler = scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        self._promised: dict[str, int] = {}  # blocks in all, by request
        self._goals: dict[str, int] = {}  # tokens to be computed in all, by request
        self._owners: dict[str, str] = {}  # the scheduler's id under which a request of vLLM has its blocks
        self._entered: dict[str, tuple[int, ...]] = {}
        self._version = 0
        self.num_blocks: int = self._pool.num_gpu_blocks - 1  # vLLM keeps one as a placeholder
        self.block_size: int = scheduler.block_size
        self.prefix_caching: bool = scheduler.cache_config.enable_prefix_caching

    @property
    def num_free(self) -> int:
        free: int = self._pool.get_num_free_blocks()
        return free - sum(max(blocks - self._held(i), 0) for i, blocks in self._promised.items())

    @property
    def cache_version(self) -> int:
        return self._version

    def block_ids(self, request_id: str) -> tuple[int, ...]:
        return ()  # vLLM tells its workers itself

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, prefix_hashes: Sequence[int], num_tokens: int) -> int:
        return len(self._matching(prefix_hashes, num_tokens)) * self.block_size

    def shortage(self, num_tokens: int, prefix_hashes: Sequence[int] = ()) -> int:
        matching = self._matching(prefix_hashes, num_tokens)
        revived = sum(1 for block in matching if block.ref_cnt == 0)
        return self.num_blocks_for(num_tokens) - len(matching) + revived - self.num_free

    def reclaimable(self, request_ids: Iterable[str]) -> int:
        references: Counter[int] = Counter()
        counts: dict[int, int] = {}
        for request_id in map(self._vllm_id, request_ids):
            for block in self._blocks(request_id):
                references[block.block_id] += 1
                counts[block.block_id] = block.ref_cnt
        return sum(1 for block_id, count in references.items() if counts[block_id] == count)

    def allocate(
        self, request_id: str, num_tokens: int, prefix_hashes: Sequence[int] = ()
    ) -> Allocation | None:
        if self.shortage(num_tokens, prefix_hashes) > 0:
            return None
        owner, request_id = request_id, self._vllm_id(request_id)
        self._owners[request_id] = owner
        matching = self._matching(prefix_hashes, num_tokens)
        shared = sum(1 for block in matching if block.ref_cnt > 0)
        # Blocks that others hold cost nothing; vLLM counts them as held by this request once it has them.
        self._promised[request_id] = self.num_blocks_for(num_tokens) - shared
        self._goals[request_id] = num_tokens
        return Allocation(block_ids=(), num_cached_tokens=len(matching) * self.block_size)

    def scheduled(self, request_ids: Iterable[str]) -> None:
        """vLLM has handed out these requests' blocks of a step: promise only what their goals need beyond them."""
        self._version += 1  # blocks may have been evicted for it
        for request_id in request_ids:
            goal = self.num_blocks_for(self._goals.get(request_id, 0))
            if goal > self._held(request_id):
                self._promised[request_id] = goal
            else:
                self._promised.pop(request_id, None)

    def entered(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """Blocks of the request have entered the prefix cache; `commit` passes it on."""
        if hashes:
            self._version += 1
            self._entered[request_id] = tuple(as_int(value) for value in hashes)

    def commit(self, request_id: str, num_computed_tokens: int) -> tuple[int, ...]:
        return self._entered.pop(self._vllm_id(request_id), ())

    def release(self, request_id: str) -> int:
        """Take the request's promise back, and its blocks if they are not all computed. A whole prompt's are vLLM's to free."""
        owner, request_id = request_id, self._vllm_id(request_id)
        if self._owners.get(request_id) != owner:
            return 0
        goal = self._goals.get(request_id, 0)
        self.disown(owner)
        before: int = self._pool.get_num_free_blocks()
        request = self._scheduler.requests.get(request_id)
        if request is not None and request.num_computed_tokens < goal:
            self._scheduler.give_back(request_id)
        return int(self._pool.get_num_free_blocks()) - before

    def disown(self, request_id: str) -> None:
        """vLLM did not take the request into the batch it was meant for: what was promised to it is free again."""
        owner, request_id = request_id, self._vllm_id(request_id)
        if self._owners.get(request_id) == owner:
            del self._owners[request_id]
            self._promised.pop(request_id, None)
            self._entered.pop(request_id, None)
            self._goals.pop(request_id, None)

    def _matching(self, prefix_hashes: Sequence[int], num_tokens: int) -> list[Any]:
        if not self.prefix_caching:
            return []
        most = min(len(prefix_hashes), (num_tokens - 1) // self.block_size)
        find = self._pool.cached_block_hash_to_block.get_one_block
        matching = []
        for value in prefix_hashes[:most]:
            block = find(make_block_hash_with_group_id(as_hash(value), _GROUP))
            if block is None:
                break
            matching.append(block)
        return matching

    def _blocks(self, request_id: str) -> Sequence[Any]:
        blocks: Sequence[Any] = self._scheduler.kv_cache_manager.get_blocks(request_id).blocks[_GROUP]
        return blocks

    def _held(self, request_id: str) -> int:
        return len(self._blocks(request_id))
