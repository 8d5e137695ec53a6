"""KV block accounting against a model that is too simple to be wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flowprefill.scheduling.kv import KVCachePool, prefix_hashes

BLOCK = 4


def hashes(*tokens: int) -> tuple[int, ...]:
    return prefix_hashes(tokens, BLOCK)


def test_only_full_blocks_have_a_hash() -> None:
    assert len(prefix_hashes(range(11), BLOCK)) == 2
    assert prefix_hashes(range(3), BLOCK) == ()


def test_a_hash_covers_everything_before_its_block() -> None:
    one, other = hashes(1, 2, 3, 4, 5, 6, 7, 8), hashes(9, 2, 3, 4, 5, 6, 7, 8)
    assert one[0] != other[0]
    assert one[1] != other[1], "equal blocks behind different prefixes hold different keys and values"
    assert one == hashes(1, 2, 3, 4, 5, 6, 7, 8)
    assert one[:1] == hashes(1, 2, 3, 4, 9, 9, 9, 9)[:1]


def test_salts_keep_caches_apart_and_parts_of_a_salt_do_not_run_together() -> None:
    plain = prefix_hashes(range(4), BLOCK)
    salted = [prefix_hashes(range(4), BLOCK, salt=salt) for salt in (("a", "bc"), ("ab", "c"), ("1",), (1,))]
    assert len({plain, *salted}) == 5


def test_hashes_are_equal_in_another_process() -> None:
    code = "from flowprefill.scheduling.kv import prefix_hashes; print(prefix_hashes(range(64), 16, salt=('m',)))"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "77"}
    )
    assert other.stdout.strip() == str(prefix_hashes(range(64), 16, salt=("m",)))


def test_blocks_are_found_only_after_the_task_that_computed_them_completed() -> None:
    pool = KVCachePool(10, BLOCK)
    prompt = hashes(*range(12))
    pool.allocate("a", 12, prompt)
    assert pool.match(prompt, 12) == 0, "allocated is not computed"
    pool.commit("a", 9)
    assert pool.match(prompt, 13) == 8, "the third block is not full yet"
    pool.commit("a", 12)
    assert pool.match(prompt, 13) == 12


def test_with_the_rule_switched_off_a_reader_gets_blocks_nobody_has_computed() -> None:
    pool = KVCachePool(10, BLOCK, commit_on_allocate=True)
    pool.allocate("a", 12, hashes(*range(12)))
    assert pool.match(hashes(*range(12)), 13) == 12


def test_at_least_one_token_is_left_to_compute() -> None:
    pool = KVCachePool(10, BLOCK)
    prompt = hashes(*range(8))
    pool.allocate("a", 8, prompt)
    pool.commit("a", 8)
    assert pool.match(prompt, 8) == 4, "a whole prompt in cache still needs its last token's output"
    assert pool.match(prompt, 9) == 8


def test_a_second_block_of_the_same_content_stays_private() -> None:
    pool = KVCachePool(10, BLOCK)
    prompt = hashes(*range(4))
    first = pool.allocate("a", 5, prompt)
    second = pool.allocate("b", 5, prompt)
    assert first is not None
    assert second is not None
    pool.commit("a", 5)
    pool.commit("b", 5)
    third = pool.allocate("c", 5, prompt)
    assert third is not None
    assert third.block_ids[0] == first.block_ids[0]
    for request_id in ("a", "b", "c"):
        pool.release(request_id)
    assert pool.num_free == 10


def test_the_tail_of_a_chain_is_evicted_before_its_head_and_the_least_recent_chain_first() -> None:
    pool = KVCachePool(4, BLOCK)
    old, new = hashes(*range(8)), hashes(*range(100, 108))
    for name, prompt in (("old", old), ("new", new)):
        pool.allocate(name, 8, prompt)
        pool.commit(name, 8)
        pool.release(name)
    assert pool.num_free == 4
    pool.allocate("one", 4)
    assert (pool.match(old, 9), pool.match(new, 9)) == (4, 8)
    pool.allocate("two", 4)
    assert (pool.match(old, 9), pool.match(new, 9)) == (0, 8)


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    pool = KVCachePool(3, BLOCK)
    prompt = hashes(*range(8))
    pool.allocate("a", 8, prompt)
    pool.commit("a", 8)
    pool.release("a")
    assert pool.shortage(16, prompt) == 1
    assert pool.allocate("b", 16, prompt) is None
    assert pool.num_free == 3
    assert pool.match(prompt, 9) == 8


def test_blocks_that_a_hit_revives_do_not_count_as_free_for_the_same_allocation() -> None:
    pool = KVCachePool(3, BLOCK)
    prompt = hashes(*range(8))
    pool.allocate("a", 8, prompt)
    pool.commit("a", 8)
    pool.release("a")
    assert pool.can_allocate(12, prompt)
    assert not pool.can_allocate(13, prompt)


def test_extend_covers_the_tokens_in_all_and_takes_nothing_when_short() -> None:
    pool = KVCachePool(3, BLOCK)
    pool.allocate("a", 5)
    assert pool.extend("a", 8) == ()
    added = pool.extend("a", 9)
    assert added is not None
    assert len(added) == 1
    assert pool.extend("a", 13) is None
    assert len(pool.block_ids("a")) == 3


def test_what_release_would_free_counts_shared_blocks_once_all_holders_are_named() -> None:
    pool = KVCachePool(10, BLOCK)
    prompt = hashes(*range(8))
    pool.allocate("a", 8, prompt)
    pool.commit("a", 8)
    pool.allocate("b", 12, prompt)
    assert pool.reclaimable(["a"]) == 0
    assert pool.reclaimable(["b"]) == 1
    assert pool.reclaimable(["a", "b"]) == 3


def test_cached_hashes_come_newest_first_and_bounded() -> None:
    pool = KVCachePool(10, BLOCK)
    one, two = hashes(*range(4)), hashes(*range(50, 54))
    for name, prompt in (("a", one), ("b", two)):
        pool.allocate(name, 5, prompt)
        pool.commit(name, 5)
    assert pool.cached_hashes(10) == (two[0], one[0])
    pool.allocate("c", 5, one)
    assert pool.cached_hashes(1) == (one[0],)


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (-1, 4), (4, 0)])
def test_a_pool_without_room_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"is (0|-1);"):
        KVCachePool(blocks, size)


def test_a_request_cannot_allocate_twice() -> None:
    pool = KVCachePool(4, BLOCK)
    pool.allocate("a", 4)
    with pytest.raises(ValueError, match="'a' holds blocks already"):
        pool.allocate("a", 4)


class PoolAgainstModel(RuleBasedStateMachine):
    """The model: who holds which blocks, and which hash was committed on which block. Nothing else."""

    NUM_BLOCKS = 12

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVCachePool(self.NUM_BLOCKS, BLOCK)
        self.held: dict[str, list[int]] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.computed: dict[int, set[tuple[int, ...]]] = {}  # block -> chains that are truly in it
        self.count = 0

    prompts_of_few = st.lists(st.sampled_from((1, 2)), min_size=1, max_size=5)

    @rule(groups=prompts_of_few, tail=st.integers(0, BLOCK - 1))
    def allocate(self, groups: list[int], tail: int) -> None:
        """Prompts from two kinds of blocks, so that prefixes are often shared."""
        tokens = [group for group in groups for _ in range(BLOCK)] + [3] * tail
        chain = tuple(tokens)
        values = prefix_hashes(chain, BLOCK)
        self.count += 1
        name = f"r{self.count}"
        free = self.pool.num_free
        expected = self.pool.match(values, len(chain))
        fits = self.pool.can_allocate(len(chain), values)
        allocation = self.pool.allocate(name, len(chain), values)
        assert (allocation is not None) == fits
        if allocation is None:
            assert self.pool.num_free == free
            return
        assert allocation.num_cached_tokens == expected < len(chain)
        assert len(allocation.block_ids) == -(-len(chain) // BLOCK)
        for index, block in enumerate(allocation.block_ids):
            if index < expected // BLOCK:
                part = chain[: (index + 1) * BLOCK]
                assert part in self.computed.get(block, set()), "a hit on a block nobody has computed"
            else:
                assert all(block not in blocks for blocks in self.held.values()), "a block owned twice"
                self.computed[block] = set()  # it will be overwritten
        self.held[name] = list(allocation.block_ids)
        self.prompts[name] = chain

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        chain = self.prompts[name]
        tokens = data.draw(st.integers(0, len(chain)))
        for index in range(tokens // BLOCK):
            self.computed.setdefault(self.held[name][index], set()).add(chain[: (index + 1) * BLOCK])
        self.pool.commit(name, tokens)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        added = self.pool.extend(name, (len(self.held[name]) + 1) * BLOCK)
        if added is not None:
            for block in added:
                assert all(block not in blocks for blocks in self.held.values()), "a block owned twice"
                self.computed[block] = set()
            self.held[name].extend(added)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        expected = self.pool.reclaimable([name])
        assert self.pool.release(name) == expected
        assert self.pool.release(name) == 0, "a second release gives nothing back"
        del self.held[name]

    @invariant()
    def every_block_is_held_or_free(self) -> None:
        held = {block for blocks in self.held.values() for block in blocks}
        assert self.pool.num_free == self.NUM_BLOCKS - len(held)

    @invariant()
    def holders_see_their_blocks(self) -> None:
        for name, blocks in self.held.items():
            assert self.pool.block_ids(name) == tuple(blocks)


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
