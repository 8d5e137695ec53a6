"""What a waiting request needs alone, given what is cached now."""

from __future__ import annotations

from collections.abc import Iterable

from flowprefill.scheduling.kv import KVCachePool
from flowprefill.scheduling.predictor import Predictor
from flowprefill.scheduling.state import WaitingRequest
from flowprefill.scheduling.waiting import WaitingQueue


def cached_tokens(waiting: WaitingRequest, kv: KVCachePool) -> int:
    """Tokens of its prompt that need no computing now: earlier chunks, or what the prefix cache has."""
    if waiting.started:
        return waiting.num_computed
    return kv.match(waiting.request.prefix_hashes, waiting.request.num_prompt_tokens)


class Pricer:
    """Keeps `base_s` of waiting requests in step with the prefix cache.

    A request is priced when it starts to wait, and again when a decision comes across it after the cache has changed:
    pricing all that wait at every change would cost a pass over the queue.
    """

    def __init__(self, kv: KVCachePool, predictor: Predictor) -> None:
        self._kv = kv
        self._predictor = predictor

    def price(self, waiting: WaitingRequest) -> None:
        """Set the request's price. Not while a queue holds it."""
        request = waiting.request
        waiting.cache_version = self._kv.cache_version
        if request.kind == "decode":  # has a correction of its own, so the common scale is taken out
            step_s = self._predictor.predict_decode_s(request.num_prompt_tokens)
            waiting.base_s = step_s / self._predictor.scale
            return
        waiting.num_cached = cached_tokens(waiting, self._kv)
        num_new = request.num_prompt_tokens - waiting.num_cached
        waiting.base_s = self._predictor.base_s(num_new, waiting.num_cached)

    def refresh(self, queue: WaitingQueue, looked_at: Iterable[WaitingRequest]) -> None:
        """Price those of `looked_at` again that still wait and whose cached prefix has changed."""
        for waiting in looked_at:
            if waiting.cache_version == self._kv.cache_version or waiting.request_id not in queue:
                continue
            waiting.cache_version = self._kv.cache_version
            num_cached = cached_tokens(waiting, self._kv)
            if num_cached != waiting.num_cached and waiting.request.kind == "prefill":
                num_new = waiting.request.num_prompt_tokens - num_cached
                base_s = self._predictor.base_s(num_new, num_cached)
                queue.reprice(waiting, base_s=base_s, num_cached=num_cached)
