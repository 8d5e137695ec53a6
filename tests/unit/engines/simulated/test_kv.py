"""The marker store finds KV that is missing, stale or another prompt's."""

from __future__ import annotations

import pytest

from flowprefill.engines.simulated.kv import MarkerStore, WrongKV


def store_with(tokens: list[int], block_ids: list[int]) -> MarkerStore:
    store = MarkerStore(8, 4)
    store.write(block_ids, tokens, 0)
    return store


def test_what_was_written_verifies_in_one_go_or_in_pieces() -> None:
    tokens = list(range(10, 21))
    whole = store_with(tokens, [5, 0, 3])
    pieces = MarkerStore(8, 4)
    pieces.write([1, 2, 4], tokens[:3], 0)
    pieces.write([1, 2, 4], tokens[3:9], 3)
    last = pieces.write([1, 2, 4], tokens[9:], 9)
    assert last == whole.write([5, 0, 3], tokens[10:], 10)
    whole.verify([5, 0, 3], 0, 11, whose="a")
    pieces.verify([1, 2, 4], 4, 11, whose="a")


def test_a_hole_is_found_with_its_position() -> None:
    store = store_with(list(range(6)), [0, 1])
    with pytest.raises(WrongKV, match="request a builds on KV that is not there: position 6 of 7"):
        store.verify([0, 1], 0, 7, whose="a")
    store.clear([0, 1], 2, 3)
    with pytest.raises(WrongKV, match="position 2 of 6"):
        store.verify([0, 1], 0, 6, whose="a")


def test_blocks_of_another_prompt_do_not_continue_this_one() -> None:
    store = store_with([1, 2, 3, 4, 5, 6, 7, 8], [0, 1])
    store.write([2, 3], [9, 2, 3, 4, 5, 6, 7, 8], 0)
    with pytest.raises(WrongKV, match="KV of other tokens: position 4 of 8"):
        store.verify([0, 3], 0, 8, whose="a")
    with pytest.raises(WrongKV, match="KV of other tokens"):
        store.verify([0, 3], 4, 8, whose="a")


def test_equal_tokens_at_other_places_have_other_kv() -> None:
    store = MarkerStore(8, 4)
    store.write([0, 1], [7] * 8, 0)
    with pytest.raises(WrongKV):
        store.verify([1, 0], 0, 8, whose="a")
    with pytest.raises(WrongKV):
        store.verify([0, 0], 0, 8, whose="a")


def test_copied_blocks_verify_and_wrong_sizes_are_refused() -> None:
    store = store_with([1, 2, 3, 4, 5, 6], [0, 1])
    store.put([6, 7], store.read([0, 1]))
    store.verify([6, 7], 0, 6, whose="a")
    with pytest.raises(ValueError, match="128 bytes do not fill 1 blocks; accepted are 64"):
        store.put([6], store.read([0, 1]))


def test_blocks_that_are_too_few_or_do_not_exist_are_refused() -> None:
    store = MarkerStore(8, 4)
    with pytest.raises(ValueError, match="2 blocks of 4 cannot hold 9 tokens"):
        store.check_blocks([0, 1], 9)
    with pytest.raises(ValueError, match=r"block ids \[8\] do not exist; accepted are 0 to 7"):
        store.check_blocks([0, 8], 8)
