"""Prefixes that were computed lately, by the hashes that proxies use for placement.

vLLM hashes blocks its own way. Proxies compare prompts with what pods say is cached by `scheduling.kv.prefix_hashes`, so these are
kept beside. vLLM may have evicted some since: a hint for placement, no promise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from flowprefill.scheduling.kv import prefix_hashes

MAX_PREFIXES = 1024


class RecentPrefixes:
    """The newest block hashes, bounded."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._hashes: OrderedDict[int, None] = OrderedDict()
        self._newest: tuple[int, ...] | None = ()

    def computed(self, token_ids: Sequence[int]) -> None:
        """KV of this prompt is in place."""
        for value in reversed(prefix_hashes(token_ids, self._block_size)):
            self._hashes[value] = None
            self._hashes.move_to_end(value)
        for value in tuple(islice(self._hashes, max(len(self._hashes) - MAX_PREFIXES, 0))):
            del self._hashes[value]
        self._newest = None

    def newest(self) -> tuple[int, ...]:
        """Newest prompt first, each from its beginning."""
        if self._newest is None:
            self._newest = tuple(reversed(self._hashes))
        return self._newest
