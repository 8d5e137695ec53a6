"""vLLM's scheduler as an allocator: it is told which requests go into a batch and how far, and does the rest as ever.

Named by `--scheduler-cls`. What differs from the stock class, and why:

1. `schedule_only` shows the stock `schedule()` the chosen requests alone. Otherwise it would schedule the next chunk of a request whose
   present chunk is suspended, or take the blocks of a suspended one when KV is short.
2. Blocks enter the prefix cache when the step that fills them *completes*. Stock registers them when it schedules the step, and
   with a suspended step another request would then read blocks that hold nothing yet.
3. A request in a step in flight is not freed: the suspended forward would still write to its blocks. `finish_requests` notes it, tells
   the observer, and the step's end carries it out.
4. `give_back` takes a request's blocks and lets it wait again, for progress that is to be computed anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from flowprefill.engines.vllm_engine.refusals import require_accepted
from flowprefill.engines.vllm_engine.supported import require_supported


class Observer(Protocol):
    """Who is told of requests that come and go by vLLM's own ways."""

    def added(self, request: Request) -> None:
        """A request came in and waits."""
        ...

    def leaving(self, request_id: str) -> None:
        """Nobody wants this request any more. It is gone, or goes when its step ends."""
        ...

    def freed(self) -> None:
        """KV that waited to be pulled, or to arrive, is free again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """A step's end: outputs by client, and per request the hashes of blocks that entered the prefix cache."""

    outputs: Any
    hashes: Mapping[str, tuple[bytes, ...]]


class AllocatingScheduler(Scheduler):
    """See the module. Used by one thread, the engine core's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.running: list[Request]
        self.waiting: Any
        self.kv_holding_waiting: Any
        require_supported()
        require_accepted(self.vllm_config)
        self.observer: Observer | None = None
        self.in_flight: dict[str, int] = {}  # request -> task
        self._to_finish: dict[str, RequestStatus] = {}
        self._ends: Mapping[str, int] = {}
        self._num_cached: dict[str, int] = {}  # full blocks of a request that are in the prefix cache
        allocate = self.kv_cache_manager.allocate_slots

        def allocate_uncached(*args: Any, **kwargs: Any) -> Any:
            return allocate(*args, **{**kwargs, "delay_cache_blocks": True})

        self.kv_cache_manager.allocate_slots = allocate_uncached

    # vLLM's ways in and out.

    def add_request(self, request: Request) -> None:
        known = request.request_id in self.requests
        super().add_request(request)
        if self.observer is not None and not known:
            self.observer.added(request)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        if request_ids is None:
            request_ids = tuple(self.requests)
        elif isinstance(request_ids, str):
            request_ids = (request_ids,)
        ids = dict.fromkeys(request_ids)
        gone = super().finish_requests([i for i in ids if i not in self.in_flight], finished_status)
        later = [self.requests[i] for i in ids if i in self.in_flight and i not in self._to_finish]
        for request in later:
            self._to_finish[request.request_id] = finished_status
        for request in gone:
            self._num_cached.pop(request.request_id, None)
        if self.observer is not None:
            for request in (*gone, *later):
                self.observer.leaving(request.request_id)
        return [*gone, *later]

    # What the loop calls.

    def schedule_only(self, ends: Mapping[str, int], task_id: int) -> Any:
        """The stock `schedule()` over these requests alone, each up to token `ends[request_id]` of its own.

        Requests that vLLM does not schedule (no blocks, not ready) are missing from the output. An empty `ends` gives an empty
        step, which carries finished ids and the KV connector's word to the workers.
        """
        assert not ends.keys() & self.in_flight.keys(), "a request is in one step at a time"
        self._ends = ends
        try:
            with self._only(ends):
                output = self.schedule()
        finally:
            self._ends = {}
        for request_id in output.num_scheduled_tokens:
            self.in_flight[request_id] = task_id
        return output

    def completed(self, output: Any, result: Any) -> Entered:
        """The step has run: its blocks may be reused, and its tokens go out."""
        entered: dict[str, tuple[bytes, ...]] = {}
        for request_id in output.num_scheduled_tokens:
            self.in_flight.pop(request_id, None)
        self._finish_noted(output)  # first: nobody hears of their tokens any more
        for request_id in output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                self.kv_cache_manager.cache_blocks(
                    request, min(request.num_computed_tokens, request.num_tokens)
                )
                entered[request_id] = self._newly_cached(request)
        outputs = self.update_from_output(output, result)
        for request_id in output.num_scheduled_tokens:
            if request_id not in self.requests:
                self._num_cached.pop(request_id, None)
        return Entered(outputs=outputs, hashes=entered)

    def unwound(self, output: Any, connector_output: Any) -> None:
        """The step ended before its end: nothing of it counts but what the KV connector has to say."""
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self.in_flight.pop(request_id, None)
            request = self.requests.get(request_id)
            if request is not None:
                request.num_in_flight_tokens -= num_tokens
                request.num_computed_tokens -= num_tokens
        if connector_output is not None:
            self._update_from_kv_xfer_finished(connector_output)
        self._finish_noted(output)

    def give_back(self, request_id: str) -> None:
        """Free the request's blocks; it waits and starts from its first token. Only requests in no step."""
        assert request_id not in self.in_flight, "a step in flight writes to its blocks"
        request = self.requests.get(request_id)
        if request is None or request.status != RequestStatus.RUNNING:
            return
        self.running.remove(request)
        self._preempt_request(request, request.arrival_time)
        self._num_cached.pop(request_id, None)

    def connector_said(self, connector_output: Any) -> None:
        """Word of finished transfers that came between steps."""
        self._update_from_kv_xfer_finished(connector_output)

    def _update_from_kv_xfer_finished(self, kv_connector_output: Any) -> None:
        """Stock calls this, and so do we, with every word of the KV connector."""
        super()._update_from_kv_xfer_finished(kv_connector_output)
        told = kv_connector_output.finished_sending or kv_connector_output.finished_recving
        if told and self.observer is not None:
            self.observer.freed()

    def _reserve_prefill_lookahead(self, request: Request, num_computed: int, num_new_tokens: int) -> int:
        """Stock calls this with the tokens it is about to schedule for a request, and takes fewer if told so."""
        num_new_tokens = super()._reserve_prefill_lookahead(request, num_computed, num_new_tokens)
        end = self._ends.get(request.request_id)
        return num_new_tokens if end is None else max(min(num_new_tokens, end - num_computed), 0)

    @contextmanager
    def _only(self, chosen: Mapping[str, int]) -> Iterator[None]:
        running, waiting, holding = self.running, self.waiting, self.kv_holding_waiting
        hidden = [request for request in running if request.request_id not in chosen]
        self.running = [request for request in running if request.request_id in chosen]
        self.waiting, self.kv_holding_waiting = (
            create_request_queue(self.policy),
            create_request_queue(self.policy),
        )
        for everybody, shown in ((waiting, self.waiting), (holding, self.kv_holding_waiting)):
            for request in [r for r in everybody if r.request_id in chosen]:
                everybody.remove_request(request)
                shown.add_request(request)
        try:
            yield
        finally:
            self.running = hidden + self.running
            left, left_holding = list(self.waiting), list(self.kv_holding_waiting)
            self.waiting, self.kv_holding_waiting = waiting, holding
            for everybody, back in ((waiting, left), (holding, left_holding)):
                for request in reversed(back):
                    everybody.prepend_request(request)

    def _newly_cached(self, request: Request) -> tuple[bytes, ...]:
        before = self._num_cached.get(request.request_id, 0)
        full = min(request.num_computed_tokens // self.block_size, len(request.block_hashes))
        self._num_cached[request.request_id] = max(before, full)
        return tuple(request.block_hashes[before:full])

    def _finish_noted(self, output: Any) -> None:
        for request_id in output.num_scheduled_tokens:
            status = self._to_finish.pop(request_id, None)
            if status is not None:
                super().finish_requests(request_id, status)
                self._num_cached.pop(request_id, None)
