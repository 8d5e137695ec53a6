"""Text in, token ids out, and back, off the event loop where it is long."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from flowprefill.errors import ContextLengthExceeded, InvalidRequest
from flowprefill.openai.requests import ChatCompletionRequest, GenerationRequest, Prompt

MOST_BYTES_PER_TOKEN = 512
"""No vocabulary has a longer token: a text of more bytes than so many times the context needs no counting."""

INLINE_CHARS = 2_000
"""Shorter texts are tokenized on the event loop: a thread hop costs more."""


class Tokenizer(Protocol):
    """What servers need of a model's tokenizer. Thread-safe."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of the messages in the model's chat template, ready for the assistant's answer."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of these tokens, special tokens left out."""
        ...


class Texts:
    """Turns requests into prompts of token ids, and answers' tokens into text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        default_answer_tokens: int | None = None,
        num_threads: int = 2,
    ) -> None:
        """`default_answer_tokens` bounds answers whose client set no limit and whose endpoint has none.

        KV for prompt and whole answer is reserved when an answer begins, so "the rest of the context" would let
        one chat without a limit take a decode pod for itself.
        """
        self._default_answer_tokens = default_answer_tokens or max_model_len
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together that this pod can take."""
        return self._max_model_len

    async def prompts(self, request: GenerationRequest) -> list[list[int]]:
        """Token ids of every prompt. Raises `InvalidRequest`; lengths are checked by `room`."""
        if isinstance(request, ChatCompletionRequest):
            messages = request.template_messages()
            size = sum(len(message["content"]) for message in messages)
            self._check_size(size, "messages")
            prompts = [await self._run(size, lambda: self._tokenizer.encode_chat(messages))]
        else:
            special = request.add_special_tokens
            prompts = [await self._encode(prompt, special) for prompt in request.prompt]
        for token_ids in prompts:
            if not token_ids:
                raise InvalidRequest("the prompt has no tokens; give at least one", param="prompt")
        return prompts

    def room(self, request: GenerationRequest, num_prompt_tokens: int, asked: int | None) -> int:
        """Most tokens that the answer to a prompt may have. Raises `ContextLengthExceeded`.

        `asked` is the client's own limit; without one the answer may fill what is left, up to the endpoint's
        default.
        """
        left = self._max_model_len - num_prompt_tokens
        wanted = 1 if asked is None else asked
        if wanted > left:
            error = ContextLengthExceeded(
                num_prompt_tokens=num_prompt_tokens, max_tokens=wanted, max_model_len=self._max_model_len
            )
            error.param = "messages" if request.endpoint == "chat" else "prompt"
            raise error
        if asked is not None:
            return asked
        return min(request.default_limit or self._default_answer_tokens, left)

    def stream(self, context: Sequence[int] = ()) -> TextStream:
        """A decoder of one answer whose prompt ends in `context`."""
        return TextStream(self._tokenizer, context[-TextStream.CONTEXT_TOKENS :])

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _check_size(self, num_chars: int, param: str) -> None:
        """Refuse what can never fit before it costs seconds and gigabytes to count. A character has a byte or more."""
        most = MOST_BYTES_PER_TOKEN * self._max_model_len
        if num_chars > most:
            raise InvalidRequest(
                f"this model's maximum context length is {self._max_model_len} tokens, but the prompt has {num_chars} "
                f"characters; at most {most} are counted, shorten the prompt",
                param=param,
                code="context_length_exceeded",
            )

    async def _encode(self, prompt: Prompt, add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, str):
            self._check_size(len(prompt), "prompt")
            return await self._run(
                len(prompt), lambda: self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            )
        largest = max(prompt)
        if largest >= self._tokenizer.vocab_size:
            raise InvalidRequest(
                f"token id {largest} is outside the vocabulary; accepted are 0 to {self._tokenizer.vocab_size - 1}",
                param="prompt",
            )
        return prompt

    async def _run(self, num_chars: int, work: _Encode) -> list[int]:
        if num_chars <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class _Encode(Protocol):
    def __call__(self) -> list[int]: ...


class TextStream:
    """Text of a growing list of tokens, in pieces that never change later.

    A token's text may depend on its neighbours (leading spaces, characters over several tokens). So a window of
    tokens is decoded with and without the new one, and nothing leaves while its end is an incomplete character.
    """

    CONTEXT_TOKENS = 4
    MAX_HELD_TOKENS = 16  # longer than any character; a model may well emit bytes that never make one

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(context)
        self._num_sent = len(self._window)

    def feed(self, token_id: int) -> str:
        """The text that this token makes certain; often one word, sometimes nothing."""
        self._window.append(token_id)
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._window) - self._num_sent < self.MAX_HELD_TOKENS:
            return ""
        # What was new becomes the context of what comes; special tokens have no text and need no place in it.
        if text:
            self._window = self._window[self._num_sent :]
        else:
            self._window = self._window[-self.MAX_HELD_TOKENS :]
        self._num_sent = len(self._window)
        return text

    def flush(self) -> str:
        """What was held back, now that no more tokens come: an incomplete character shows as U+FFFD."""
        text = self._new_text()
        self._num_sent = len(self._window)
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._window[: self._num_sent])
        return self._tokenizer.decode(self._window)[len(before) :]
