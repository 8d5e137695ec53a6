"""What a waiting request needs alone, given what is cached now."""

from __future__ import annotations

from collections.abc import Iterable

from flowprefill.scheduling.kv import KVAccounting
from flowprefill.scheduling.predictor import Predictor
from flowprefill.scheduling.state import WaitingRequest
from flowprefill.scheduling.waiting import WaitingQueue


def cached_tokens(waiting: WaitingRequest, kv: KVAccounting) -> int:
    """Tokens of its prompt that need no computing now: earlier chunks, or what the prefix cache has."""
    if waiting.started:
        return waiting.num_computed
    return kv.match(waiting.request.prefix_hashes, waiting.request.num_prompt_tokens)


MAX_REPRICED = 64
"""Requests priced again in one event because their prefix entered the cache; the others follow in later ones."""


class Pricer:
    """Keeps `base_s` of waiting requests in step with the prefix cache.

    A request is priced when it starts to wait; again when the block it lacked enters the cache, so that what became
    cheap does not stay behind as hopeless; and again when a decision comes across it after the cache changed, so
    that what was evicted is not believed in. Pricing all that wait at every change would cost a pass over the queue.
    """

    def __init__(self, kv: KVAccounting, predictor: Predictor) -> None:
        self._kv = kv
        self._predictor = predictor
        self._stale: dict[str, WaitingRequest] = {}

    def price(self, waiting: WaitingRequest) -> None:
        """Set the request's price. Not while a queue holds it."""
        request = waiting.request
        waiting.cache_version = self._kv.cache_version
        if request.kind == "decode":  # has a correction of its own, so the common scale is taken out
            step_s = self._predictor.predict_decode_s(request.num_prompt_tokens)
            waiting.base_s = step_s / self._predictor.scale
            return
        waiting.num_cached = cached_tokens(waiting, self._kv)
        waiting.awaited_hash = self._awaited(waiting, waiting.num_cached)
        num_new = request.num_prompt_tokens - waiting.num_cached
        waiting.base_s = self._predictor.base_s(num_new, waiting.num_cached)

    def entered(self, queue: WaitingQueue, hashes: Iterable[int]) -> None:
        """These blocks have entered the cache."""
        for prefix_hash in hashes:
            self._stale.update((waiting.request_id, waiting) for waiting in queue.awaiting(prefix_hash))

    def catch_up(self, queue: WaitingQueue) -> None:
        """Price again a bounded number of those whose missing block has entered the cache."""
        for _ in range(min(len(self._stale), MAX_REPRICED)):
            request_id = next(iter(self._stale))
            waiting = self._stale.pop(request_id)
            if queue.get(request_id) is waiting:
                self.refresh(queue, (waiting,))

    def refresh(self, queue: WaitingQueue, looked_at: Iterable[WaitingRequest]) -> None:
        """Price those of `looked_at` again that still wait and whose cached prefix has changed."""
        for waiting in looked_at:
            if waiting.cache_version == self._kv.cache_version or waiting.request_id not in queue:
                continue
            waiting.cache_version = self._kv.cache_version
            num_cached = cached_tokens(waiting, self._kv)
            if num_cached == waiting.num_cached or waiting.request.kind == "decode":
                continue
            num_new = waiting.request.num_prompt_tokens - num_cached
            queue.reprice(
                waiting,
                base_s=self._predictor.base_s(num_new, num_cached),
                num_cached=num_cached,
                awaited_hash=self._awaited(waiting, num_cached),
            )

    def _awaited(self, waiting: WaitingRequest, num_cached: int) -> int | None:
        """The first block of the prompt that could come from the cache and does not yet."""
        request = waiting.request
        index = num_cached // self._kv.block_size
        usable = min(len(request.prefix_hashes), (request.num_prompt_tokens - 1) // self._kv.block_size)
        return request.prefix_hashes[index] if index < usable and not waiting.started else None
