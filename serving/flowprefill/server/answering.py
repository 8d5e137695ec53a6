"""From deltas to HTTP: the stream of chunks or the whole answer, for one prompt or several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from flowprefill.openai.requests import GenerationRequest
from flowprefill.openai.responses import Choice, FinishReason, ResponseShape, Usage
from flowprefill.openai.sse import DONE, encode
from flowprefill.server.choices import Delta
from flowprefill.server.decoding import Answer


class Reply:
    """All answers of one request (one per prompt), and the usage they add up to."""

    def __init__(
        self,
        request: GenerationRequest,
        shape: ResponseShape,
        answers: Sequence[Answer],
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        on_tokens: Callable[[int], None] = lambda num_tokens: None,
    ) -> None:
        """`on_tokens` is told once how many tokens were generated, however the reply ends."""
        self._on_tokens = on_tokens
        self._request = request
        self._shape = shape
        self._answers = answers
        self._num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = num_cached_tokens

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(answer.num_tokens for answer in self._answers),
            cached_tokens=self.num_cached_tokens,
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The stream of server-sent events. Nothing leaves before the first token, so errors before it are statuses."""
        greeted: set[int] = set()
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                if delta.index not in greeted:
                    greeted.add(delta.index)
                    if (role := self._shape.role_chunk(delta.index)) is not None:
                        yield encode(role)
                yield encode(self._shape.text_chunk(delta.index, delta.text, delta.finish_reason))
        if self._request.include_usage:
            yield encode(self._shape.usage_chunk(self.usage))
        yield DONE

    async def whole(self) -> dict[str, object]:
        """The answer to a request without `stream`."""
        texts: dict[int, list[str]] = {}
        reasons: dict[int, FinishReason] = {}
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                texts.setdefault(delta.index, []).append(delta.text)
                if delta.finish_reason is not None:
                    reasons[delta.index] = delta.finish_reason
        choices = [
            Choice(index=index, text="".join(texts[index]), finish_reason=reasons[index])
            for index in sorted(texts)
        ]
        return self._shape.whole(choices, self.usage)

    async def _deltas(self) -> AsyncGenerator[Delta, None]:
        """Deltas of all answers; leaving early ends all of them."""
        try:
            async with aclosing(self._merged()) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._on_tokens(sum(answer.num_tokens for answer in self._answers))

    async def _merged(self) -> AsyncGenerator[Delta, None]:
        if len(self._answers) == 1:
            async with aclosing(self._answers[0].deltas()) as deltas:
                async for delta in deltas:
                    yield delta
            return
        merged: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(maxsize=64)
        readers = [asyncio.ensure_future(_read(answer, merged)) for answer in self._answers]
        try:
            running = len(readers)
            while running:
                item = await merged.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)


async def _read(answer: Answer, merged: asyncio.Queue[Delta | Exception | None]) -> None:
    try:
        async with aclosing(answer.deltas()) as deltas:
            async for delta in deltas:
                await merged.put(delta)
    except Exception as error:  # raised again by the reader of the queue
        await merged.put(error)
    else:
        await merged.put(None)
