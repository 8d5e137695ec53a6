"""The shared page: for each slot, where the ranks of its step stop and how far they have come.

| word of a slot | written by | read by |
| --- | --- | --- |
| stop | leader | all ranks, at every point |
| done | leader, at every point | engine core |
| passed, one a rank | that rank, at every point | leader |

A word is eight aligned bytes and is written whole. The engine core resets a slot's words before it sends a step there; no rank is in
the slot then. The page is anonymous memory, handed on as a file descriptor: it has no name, so nothing is left of it.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

_NONE = -1
_WORD_BYTES = 8
_DONE_UNIT = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PageShape:
    """How many words there are."""

    num_slots: int
    num_ranks: int

    @property
    def words_per_slot(self) -> int:
        return 2 + self.num_ranks

    @property
    def size_bytes(self) -> int:
        return self.num_slots * self.words_per_slot * _WORD_BYTES


class Page:
    """The page in this process."""

    def __init__(self, shape: PageShape, descriptor: int) -> None:
        """Map the page behind `descriptor`, which may be closed afterwards."""
        self._shape = shape
        self._memory = mmap.mmap(descriptor, shape.size_bytes)
        self._words = memoryview(self._memory).cast("q")

    def row(self, slot: int) -> Row:
        """The words of a slot."""
        assert 0 <= slot < self._shape.num_slots, f"slot {slot} of {self._shape.num_slots}"
        size = self._shape.words_per_slot
        return Row(self._words[slot * size : (slot + 1) * size])

    def close(self) -> None:
        """Unmap it, unless a step still uses its row."""
        self._words.release()
        try:
            self._memory.close()
        except BufferError:
            return  # unmapped with the last row


class Row:
    """The words of one slot."""

    __slots__ = ("_words",)

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def reset(self) -> None:
        """As before any step."""
        self._words[1] = 0
        for position in (0, *range(2, len(self._words))):
            self._words[position] = _NONE

    @property
    def stop(self) -> int | None:
        """Where all ranks stop; None when nobody is to."""
        stop = self._words[0]
        return None if stop == _NONE else stop

    @stop.setter
    def stop(self, stop: int | None) -> None:
        self._words[0] = _NONE if stop is None else stop

    @property
    def work_done(self) -> float:
        """The part of its work that the leader has done, in [0, 1]."""
        return float(self._words[1] * _DONE_UNIT)

    @work_done.setter
    def work_done(self, done: float) -> None:
        self._words[1] = int(done / _DONE_UNIT)

    def passes(self, rank: int, place: int) -> None:
        """This rank is at `place`."""
        self._words[2 + rank] = place

    def furthest(self) -> int:
        """The furthest place of any rank, -1 when none has come to one."""
        return max(self._words[2:])


def new_page(shape: PageShape) -> tuple[Page, int]:
    """A page and a descriptor to hand on, which the caller closes."""
    descriptor = os.memfd_create("flowprefill-ranks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, shape.size_bytes)
    page = Page(shape, descriptor)
    for slot in range(shape.num_slots):
        page.row(slot).reset()
    return page, descriptor
