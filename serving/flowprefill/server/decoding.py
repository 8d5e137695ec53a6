"""Jobs on a decoder, seen from the event loop: one `Answer` per request with its `n` choices.

    HTTP handler ── Answer.deltas() ◀── queue ◀── DecodeBridge (listener, hops threads) ◀── Decoder's thread
                                                     └─ on_admitted: runs the answer's fill, then filled / fill_failed

Rules of this file
1. Between `on_admitted` and `filled` / `fill_failed` somebody may be writing the blocks, so the fill always runs to
   one of the two, also when the client has left; `on_end` comes after it.
2. The first choice is filled before the others are submitted: they then find the prompt's full blocks in the pool's
   prefix cache and only their last block has to be brought.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from flowprefill.errors import EngineFailed, FlowPrefillError, Unavailable
from flowprefill.execution.decode import DecodeJob, Decoder, EndReason
from flowprefill.server.choices import AnswerPlan, Choice, Delta
from flowprefill.server.text import TextStream

log = logging.getLogger(__name__)

Fill = Callable[[Sequence[int], int], Awaitable[None]]
"""Brings the prompt's KV: `(block_ids, num_cached_tokens)`. Raises what the client is to be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filled:
    choice: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    choice: int
    token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    choice: int
    reason: EndReason
    detail: str


_AnswerEvent = _Filled | _Token | _End


class Answer:
    """One prompt's choices. Iterate `deltas` once; closing the generator cancels what still runs."""

    def __init__(
        self,
        plan: AnswerPlan,
        bridge: DecodeBridge,
        fill: Fill,
        new_texts: Callable[[], TextStream],
        *,
        before: Callable[[], Awaitable[int | None]] | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`new_texts` makes a text stream per choice.

        `before` is awaited before the first choice is submitted and gives the answer's first token; `on_close` is called when nobody reads any more.
        """
        self._before = before
        self._on_close = on_close
        self._plan = plan
        self._bridge = bridge
        self._fill = fill
        self._events: asyncio.Queue[_AnswerEvent] = asyncio.Queue()
        self._choices = [Choice(plan, plan.first_index + i, new_texts()) for i in range(plan.n)]
        self._fills: set[asyncio.Task[None]] = set()
        self._fill_errors: dict[int, Exception] = {}
        self._closed = False
        self._submitted: list[DecodeJob] = []

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, over all choices."""
        return sum(choice.num_tokens for choice in self._choices)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Pieces of all choices as they come, each choice's last one with its finish reason.

        Raises what the decoder or the fill raised; a failure of one choice is a failure of the answer.
        """
        try:
            if self._before is not None:
                self._plan = replace(self._plan, first_token_id=await self._before())
            self._submit(0)
            while any(choice.open for choice in self._choices):
                delta = self._take(await self._events.get())
                if delta is not None:
                    yield delta
        finally:
            self._close()

    def _take(self, event: _AnswerEvent) -> Delta | None:
        choice = self._choices[event.choice]
        match event:
            case _Filled(choice=0):
                for other in range(1, self._plan.n):
                    self._submit(other)
                return None
            case _Token(token_id=token_id) if choice.open:
                delta = choice.token(token_id)
                if delta is not None and delta.finish_reason is not None:
                    self._bridge.decoder.cancel(self._submitted[event.choice].request_id)
                return delta
            case _End(reason=reason, detail=detail) if choice.open:
                if reason in ("stop", "length"):
                    return choice.end(reason)
                raise self._error(event.choice, reason, detail)
            case _:
                return None

    def _error(self, choice: int, reason: EndReason, detail: str) -> Exception:
        if choice in self._fill_errors:
            return self._fill_errors[choice]
        if reason == "cancelled":
            return Unavailable("the pod is stopping and ended this answer")
        return EngineFailed(detail or "the engine failed while it generated this answer")

    def _submit(self, choice: int) -> None:
        job = self._plan.job(choice)
        self._bridge.submit(job, self, choice)
        self._submitted.append(job)

    def _close(self) -> None:
        self._closed = True
        for job in self._submitted:
            self._bridge.decoder.cancel(job.request_id)
        for fill in self._fills:
            fill.cancel()
        self._on_close()

    # Called by the bridge, on the event loop.

    def admitted(self, job_id: str, choice: int, block_ids: Sequence[int], num_cached: int) -> None:
        """Blocks are there: bring the KV."""
        if self._closed:
            self._bridge.decoder.fill_failed(job_id, "nobody waits for this answer")
            return
        task = asyncio.ensure_future(self._run_fill(job_id, choice, block_ids, num_cached))
        self._fills.add(task)
        self._bridge.track(task)
        task.add_done_callback(self._fills.discard)

    def put(self, event: _AnswerEvent) -> None:
        self._events.put_nowait(event)

    async def _run_fill(self, job_id: str, choice: int, block_ids: Sequence[int], num_cached: int) -> None:
        try:
            await self._fill(block_ids, num_cached)
        except asyncio.CancelledError:
            self._bridge.decoder.fill_failed(job_id, "nobody waits for this answer")
            raise
        except Exception as error:  # the top of this task; the answer's reader raises it
            if not isinstance(error, FlowPrefillError):
                log.exception("KV could not be brought", extra={"request_id": job_id})
            self._fill_errors[choice] = error
            self._bridge.decoder.fill_failed(job_id, str(error))
        else:
            self._bridge.decoder.filled(job_id)
            self.put(_Filled(choice=choice))


class DecodeBridge:
    """The decoder's listener: hands what happened on the decoder's thread to the event loop, in order.

    Whatever happened since the loop last looked crosses in one hop.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        """`on_change` is called on the event loop when a job began or ended."""
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._decoder: Decoder | None = None
        self._lock = threading.Lock()
        self._crossing: deque[Callable[[], None]] = deque()
        self._jobs: dict[str, tuple[Answer, int]] = {}
        self._fills: set[asyncio.Task[None]] = set()

    @property
    def decoder(self) -> Decoder:
        assert self._decoder is not None, "connect comes first"
        return self._decoder

    def connect(self, decoder: Decoder) -> None:
        """Say whose listener this is."""
        self._decoder = decoder

    def submit(self, job: DecodeJob, answer: Answer, choice: int) -> None:
        """Queue a job whose events go to `answer`."""
        self._jobs[job.request_id] = (answer, choice)
        try:
            self.decoder.submit(job)
        except BaseException:
            del self._jobs[job.request_id]
            raise
        self._on_change()

    def track(self, fill: asyncio.Task[None]) -> None:
        """Keep a fill alive until it ends."""
        self._fills.add(fill)
        fill.add_done_callback(self._fills.discard)

    async def close(self) -> None:
        """Wait for all fills to end."""
        await asyncio.gather(*self._fills, return_exceptions=True)

    # The decoder's thread.

    def on_admitted(self, request_id: str, block_ids: Sequence[int], num_cached_tokens: int) -> None:
        ids = tuple(block_ids)
        self._cross(lambda: self._admitted(request_id, ids, num_cached_tokens))

    def on_token(self, request_id: str, token_id: int) -> None:
        self._cross(lambda: self._token(request_id, token_id))

    def on_end(self, request_id: str, reason: EndReason, detail: str) -> None:
        self._cross(lambda: self._end(request_id, reason, detail))

    def _cross(self, event: Callable[[], None]) -> None:
        with self._lock:
            self._crossing.append(event)
            if len(self._crossing) > 1:
                return
        try:
            self._loop.call_soon_threadsafe(self._drain)
        except RuntimeError:  # the loop is closed: nobody listens any more
            log.debug("a decoder's event came after the loop's end")

    # The event loop.

    def _drain(self) -> None:
        with self._lock:
            events = list(self._crossing)
            self._crossing.clear()
        for event in events:
            try:
                event()
            except Exception:  # one job's trouble must not swallow the others' events
                log.exception("a decoder's event was not taken in")

    def _admitted(self, request_id: str, block_ids: Sequence[int], num_cached_tokens: int) -> None:
        if (found := self._jobs.get(request_id)) is not None:
            answer, choice = found
            answer.admitted(request_id, choice, block_ids, num_cached_tokens)

    def _token(self, request_id: str, token_id: int) -> None:
        if (found := self._jobs.get(request_id)) is not None:
            answer, choice = found
            answer.put(_Token(choice=choice, token_id=token_id))

    def _end(self, request_id: str, reason: EndReason, detail: str) -> None:
        if (found := self._jobs.pop(request_id, None)) is not None:
            answer, choice = found
            answer.put(_End(choice=choice, reason=reason, detail=detail))
            self._on_change()
