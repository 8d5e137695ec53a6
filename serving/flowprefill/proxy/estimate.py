"""How long a prompt is and which prefix it has, before any pod has seen it. Placement only: pods count for real."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from flowprefill.openai.requests import ChatCompletionRequest, GenerationRequest, Prompt
from flowprefill.scheduling.kv import prefix_hashes

log = logging.getLogger(__name__)

BYTES_PER_TOKEN = 4.0
CHAT_OVERHEAD_TOKENS = 8
"""What a chat template adds per message, roughly."""

GAIN = 0.05
"""Weight of one count once many were seen; the first ones weigh more."""

MAX_DISAGREEMENTS = 3
"""So many counts of pods in a row that differ from the tokenizer's mean that pods use another one."""

MAX_TOKENIZED_CHARS = 1 << 20
"""Longer prompts are estimated from their size: counting them takes seconds and gigabytes, for a hint."""

MIN_FACTOR, MAX_FACTOR = 0.2, 5.0

Tokenize = Callable[[GenerationRequest, Prompt | None], Sequence[int]]
"""Token ids of one prompt of a request as a pod would see them; None stands for a chat's messages."""


Source = Literal["ids", "tokenizer", "bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A prompt's length in tokens, and one hash per full block when its tokens are known.

    `source` says how it was found: the client's own token ids, a tokenizer, or the size in bytes.
    """

    num_tokens: int
    hashes: tuple[int, ...] = ()
    source: Source = "bytes"


class Estimator:
    """Counts tokens with a tokenizer when there is one; otherwise bytes over a calibrated ratio."""

    def __init__(
        self, *, block_size: int, tokenize: Tokenize | None = None, salt: Sequence[str | int] = ()
    ) -> None:
        self._block_size = block_size
        self._tokenize = tokenize
        self._salt = tuple(salt)
        self._factor = 1.0
        self._num_counts = 0
        self._disagreements = 0

    def use(self, tokenize: Tokenize) -> None:
        """Count with a tokenizer from now on."""
        self._tokenize = tokenize

    def estimate(self, request: GenerationRequest, prompt: Prompt | None) -> Estimate:
        """The length of one prompt (None: a chat's messages). Takes milliseconds for a long one: any thread."""
        if isinstance(prompt, list):
            return self._exact(prompt, "ids")
        tokenize = self._tokenize
        if tokenize is not None and _num_chars(request, prompt) <= MAX_TOKENIZED_CHARS:
            try:
                return self._exact(tokenize(request, prompt), "tokenizer")
            except Exception as error:  # a template may raise anything; the pod will say what is wrong
                log.debug("prompt not tokenized", extra={"reason": repr(error)})
        return Estimate(num_tokens=max(round(self._factor * _rough_tokens(request, prompt)), 1))

    def measured(self, estimate: Estimate, num_prompt_tokens: int) -> None:
        """A pod counted a prompt. Event loop only.

        Moves the ratio of bytes to tokens towards it. A tokenizer that disagrees with the pods again and again is
        not theirs: its counts and hashes would mislead, so it is given up.
        """
        if num_prompt_tokens < 1:
            return
        match estimate.source:
            case "ids":
                return
            case "tokenizer":
                agrees = estimate.num_tokens == num_prompt_tokens
                self._disagreements = 0 if agrees else self._disagreements + 1
                if self._disagreements >= MAX_DISAGREEMENTS and self._tokenize is not None:
                    self._tokenize = None
                    log.warning(
                        "the tokenizer here is not the pods'; prompt lengths are estimated",
                        extra={"counted_here": estimate.num_tokens, "counted_there": num_prompt_tokens},
                    )
            case "bytes":
                self._num_counts += 1
                seen = self._factor * num_prompt_tokens / estimate.num_tokens
                gain = max(GAIN, 1.0 / (self._num_counts + 1))
                self._factor += gain * (min(max(seen, MIN_FACTOR), MAX_FACTOR) - self._factor)

    def _exact(self, token_ids: Sequence[int], source: Source) -> Estimate:
        hashes = prefix_hashes(token_ids, self._block_size, salt=self._salt)
        return Estimate(num_tokens=max(len(token_ids), 1), hashes=hashes, source=source)


def _num_chars(request: GenerationRequest, prompt: str | None) -> int:
    if prompt is not None:
        return len(prompt)
    assert isinstance(request, ChatCompletionRequest)
    return sum(len(m.content) for m in request.messages)


def _rough_tokens(request: GenerationRequest, prompt: str | None) -> float:
    if prompt is not None:
        return len(prompt.encode("utf-8", "surrogatepass")) / BYTES_PER_TOKEN
    assert isinstance(request, ChatCompletionRequest)
    size = sum(len(m.content.encode("utf-8", "surrogatepass")) for m in request.messages)
    return size / BYTES_PER_TOKEN + CHAT_OVERHEAD_TOKENS * len(request.messages)
