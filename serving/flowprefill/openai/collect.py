"""Folds a stream of chunks into the whole answer (a proxy streams internally and answers unary clients)."""

from __future__ import annotations

from typing import Any

from flowprefill.errors import UpstreamFailed
from flowprefill.openai.requests import Endpoint


class ResponseCollector:
    """Chunks of one answer, of either endpoint, added in order; `response` is what `stream: false` answers.

    Ask the upstream for usage (`stream_options.include_usage`) to have it in the response. Raises
    `UpstreamFailed` on chunks without the shape of OpenAI's. Memory is bounded by `max_text_chars`.
    """

    def __init__(self, endpoint: Endpoint, *, max_text_chars: int = 16 * 2**20) -> None:
        self._endpoint = endpoint
        self._max_text_chars = max_text_chars
        self._num_chars = 0
        self._head: dict[str, Any] | None = None  # Any: an upstream's JSON, here and below
        self._texts: dict[int, list[str]] = {}
        self._reasons: dict[int, str | None] = {}
        self._usage: dict[str, Any] | None = None

    def add(self, chunk: dict[str, Any]) -> None:
        """Take in one decoded chunk."""
        if self._head is None:
            self._head = {k: chunk[k] for k in ("id", "created", "model", "service_tier") if k in chunk}
        if isinstance(usage := chunk.get("usage"), dict):
            self._usage = usage
        try:
            for choice in chunk["choices"]:
                self._add_choice(choice)
        except (KeyError, TypeError, AttributeError):
            raise UpstreamFailed(f"the pod sent a chunk without OpenAI's shape: {str(chunk)[:200]}") from None

    @property
    def finished(self) -> bool:
        """Whether every choice seen so far has its finish reason."""
        return bool(self._texts) and all(self._reasons.get(index) for index in self._texts)

    def response(self) -> dict[str, Any]:
        """The whole answer. Raises `UpstreamFailed` when the stream ended before every choice did."""
        if self._head is None or not self.finished:
            raise UpstreamFailed("the pod's stream ended before the answer did")
        answer = self._head | {
            "object": "chat.completion" if self._endpoint == "chat" else "text_completion",
            "choices": [self._choice(index) for index in sorted(self._texts)],
        }
        if self._usage is not None:
            answer["usage"] = self._usage
        return answer

    def _add_choice(self, choice: dict[str, Any]) -> None:
        index = int(choice["index"])
        text = choice["delta"].get("content") if self._endpoint == "chat" else choice["text"]
        self._num_chars += len(text or "")
        if self._num_chars > self._max_text_chars:
            raise UpstreamFailed(f"the answer has more than {self._max_text_chars} characters")
        self._texts.setdefault(index, []).append(text or "")
        if reason := choice.get("finish_reason"):
            self._reasons[index] = reason

    def _choice(self, index: int) -> dict[str, Any]:
        text = "".join(self._texts[index])
        head: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": self._reasons[index]}
        if self._endpoint == "chat":
            return head | {"message": {"role": "assistant", "content": text, "refusal": None}}
        return head | {"text": text}
