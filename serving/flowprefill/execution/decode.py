"""What a server says to a decode loop and hears from it.

A server uses either `DecodeLoop` (a decode pod: own thread) or `ColocatedDecode` (one pod that does both: steps
go through the scheduler) through the one interface `Decoder`:

1. `submit(job)`: the job waits in a bounded queue until its blocks fit, for prompt and answer together, so that a
   running sequence never runs out of KV.
2. `on_admitted(request_id, block_ids, num_cached_tokens)`: the server brings the prompt's KV into these blocks
   (`Engine.write_blocks`), then calls `filled(request_id)`, or `fill_failed(request_id, detail)`. Exactly one of the
   two, also when the request was cancelled meanwhile: until then somebody may still be writing the blocks.
3. `on_token(request_id, token_id)` for every token. A job with a `first_token_id` has its first one as soon as it is
   filled; the first step of any other feeds the prompt's *last* token again, at its position.
4. `on_end(request_id, reason, detail)`, exactly once, and nothing after it. The job's blocks are free from then on: so
   the end of a cancelled job, which gets no more tokens, waits for its fill or its present step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from flowprefill.engines.protocol import SamplingParams

EndReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeJob:
    """One answer to generate; `n` answers to one prompt are `n` jobs.

    `last_token_id` is the prompt's last token, at position `num_prompt_tokens - 1`; `first_token_id` is the answer's
    first, where the prefill chose it by the job's `sampling` (not where `min_tokens` forbids some). A token of
    `stop_token_ids` ends the answer; it is delivered like any other, and it is not sampled before `min_tokens` tokens are
    out.
    `prefix_hashes` are the prompt's block hashes: blocks that the pool already holds need no filling
    (`num_cached_tokens` says how many tokens). `tbt_slo_s` is the wanted time between tokens; only colocated decoding
    uses it.
    """

    request_id: str
    num_prompt_tokens: int
    last_token_id: int
    first_token_id: int | None = None
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    prefix_hashes: tuple[int, ...] = ()
    tbt_slo_s: float = 0.1

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 1:
            raise ValueError(f"num_prompt_tokens is {self.num_prompt_tokens}; a prompt has at least 1 token")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; an answer has at least 1 token")
        if self.first_token_id is not None and self.min_tokens > 0:
            raise ValueError(
                f"first_token_id comes with min_tokens {self.min_tokens}; accepted is 0: a prefill does not know "
                f"which tokens may not end the answer yet"
            )
        if not self.tbt_slo_s > 0:
            raise ValueError(f"tbt_slo_s is {self.tbt_slo_s}; accepted are positive numbers of seconds")

    @property
    def num_filled_tokens(self) -> int:
        """Tokens of the prompt whose KV is in place when the job is filled; the first step writes the others'."""
        return self.num_prompt_tokens - (self.first_token_id is None)

    @property
    def num_reserved_tokens(self) -> int:
        """Tokens whose KV the job may need: the prompt and the whole answer."""
        return self.num_prompt_tokens + self.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeState:
    """How full a decoder is. `filling` jobs own blocks and wait for their KV; `active` ones are in the batch."""

    queued: int
    filling: int
    active: int
    kv_blocks: int
    kv_blocks_free: int
    num_steps: int
    num_tokens: int


class DecodeListener(Protocol):
    """Hears of a decoder's jobs, in order, one call at a time: it hands over (`call_soon_threadsafe`) and returns.

    Calls come on the decoder's thread, or on the thread whose call to the decoder caused them.
    """

    def on_admitted(self, request_id: str, block_ids: Sequence[int], num_cached_tokens: int) -> None:
        """Blocks are reserved: in prompt order, the first `num_cached_tokens` tokens already in place."""
        ...

    def on_token(self, request_id: str, token_id: int) -> None:
        """The next token of the answer."""
        ...

    def on_end(self, request_id: str, reason: EndReason, detail: str) -> None:
        """The job is over; `detail` is for people and is empty unless `reason` is `error`."""
        ...


class Decoder(Protocol):
    """Continuous batching: sequences join and leave between steps. All methods are thread-safe and return at once."""

    def submit(self, job: DecodeJob) -> None:
        """Queue a job.

        Raises `QueueFull` when the queue has no room, `InvalidRequest` when the job could never fit the pool,
        `Unavailable` when the decoder is closed, and ValueError for a request id that is in use.
        """
        ...

    def filled(self, request_id: str) -> None:
        """The prompt's KV is in the job's blocks; it joins the next step that has room."""
        ...

    def fill_failed(self, request_id: str, detail: str) -> None:
        """The prompt's KV could not be brought: the job ends with `error`."""
        ...

    def cancel(self, request_id: str) -> None:
        """Nobody waits for this job any more. Unknown and ended ids are ignored."""
        ...

    def state(self) -> DecodeState:
        """How full the decoder is now."""
        ...
