"""The shared page."""

from __future__ import annotations

import os

import pytest

from flowprefill.server.vllm.ranks.page import Page, PageShape, new_page

SHAPE = PageShape(num_slots=3, num_ranks=4)


def test_what_one_mapping_writes_another_reads_and_slots_are_apart() -> None:
    ours, descriptor = new_page(SHAPE)
    theirs = Page(SHAPE, descriptor)
    os.close(descriptor)
    ours.row(1).stop = 7
    theirs.row(1).passes(2, 5)
    theirs.row(1).passes(3, 11)
    theirs.row(1).work_done = 0.25
    assert theirs.row(1).stop == 7
    assert ours.row(1).furthest() == 11
    assert ours.row(1).work_done == pytest.approx(0.25, abs=1e-9)
    for slot in (0, 2):
        assert (ours.row(slot).stop, ours.row(slot).furthest(), ours.row(slot).work_done) == (None, -1, 0.0)
    ours.row(1).stop = None
    assert theirs.row(1).stop is None


def test_a_reset_row_is_as_before_any_step() -> None:
    page, descriptor = new_page(SHAPE)
    os.close(descriptor)
    row = page.row(0)
    row.stop, row.work_done = 3, 0.5
    row.passes(1, 9)
    row.reset()
    assert (row.stop, row.furthest(), row.work_done) == (None, -1, 0.0)


def test_the_page_has_no_name_in_the_file_system() -> None:
    page, descriptor = new_page(SHAPE)
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{descriptor}")
    os.close(descriptor)
    page.close()
