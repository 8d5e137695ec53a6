"""Response objects of both endpoints, built in one place so that stream and whole answer agree."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from flowprefill.openai.requests import Endpoint

FinishReason = Literal["stop", "length"]
Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one answer; `cached_tokens` were in a prefix cache and not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A finished choice."""

    index: int
    text: str
    finish_reason: FinishReason


def new_response_id(endpoint: Endpoint) -> str:
    """A fresh id in OpenAI's form."""
    return f"{'chatcmpl' if endpoint == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseShape:
    """What all chunks of one answer share. `created` is Unix time in whole seconds.

    `include_usage` follows OpenAI's stream: every chunk then carries `usage: null` and the last one, without
    choices, the numbers.
    """

    endpoint: Endpoint
    model: str
    response_id: str
    created: int = field(default_factory=lambda: int(time.time()))
    include_usage: bool = False

    @classmethod
    def new(cls, endpoint: Endpoint, model: str, *, include_usage: bool = False) -> ResponseShape:
        return cls(
            endpoint=endpoint,
            model=model,
            response_id=new_response_id(endpoint),
            include_usage=include_usage,
        )

    def role_chunk(self, index: int) -> Json | None:
        """Chat's first chunk of a choice, which names the role and holds no content; None for completions."""
        if self.endpoint == "completions":
            return None
        return self._chunk([_chat_delta(index, {"role": "assistant", "content": ""}, None)])

    def text_chunk(self, index: int, text: str, finish_reason: FinishReason | None = None) -> Json:
        """A piece of a choice's text; the choice's last chunk carries its finish reason."""
        if self.endpoint == "chat":
            return self._chunk([_chat_delta(index, {"content": text} if text else {}, finish_reason)])
        return self._chunk([_completion_choice(index, text, finish_reason)])

    def usage_chunk(self, usage: Usage) -> Json:
        """The stream's last chunk when usage was asked for."""
        return self._head("chat.completion.chunk") | {"choices": [], "usage": usage.json()}

    def whole(
        self,
        choices: Sequence[Choice],
        usage: Usage,
        *,
        kv_transfer_params: Mapping[str, object] | None = None,
    ) -> Json:
        """The answer to a request without `stream`."""
        listed: list[Json]
        if self.endpoint == "chat":
            listed = [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": None,
                    "finish_reason": choice.finish_reason,
                }
                for choice in choices
            ]
        else:
            listed = [
                _completion_choice(choice.index, choice.text, choice.finish_reason) for choice in choices
            ]
        answer = self._head("chat.completion") | {"choices": listed, "usage": usage.json()}
        if kv_transfer_params is not None:
            answer["kv_transfer_params"] = dict(kv_transfer_params)
        return answer

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = self._head("chat.completion.chunk") | {"choices": choices}
        if self.include_usage:
            chunk["usage"] = None
        return chunk

    def _head(self, chat_object: str) -> Json:
        head: Json = {
            "id": self.response_id,
            "object": chat_object if self.endpoint == "chat" else "text_completion",
            "created": self.created,
            "model": self.model,
        }
        return head


def models_list(served_names: Sequence[str], *, created: int, max_model_len: int | None = None) -> Json:
    """The body of `GET /v1/models`. `max_model_len` is vLLM's addition, in tokens."""
    return {
        "object": "list",
        "data": [model_card(n, created=created, max_model_len=max_model_len) for n in served_names],
    }


def model_card(served_name: str, *, created: int, max_model_len: int | None = None) -> Json:
    """One served model, as in `GET /v1/models/{name}`."""
    card: Json = {"id": served_name, "object": "model", "created": created, "owned_by": "flowprefill"}
    if max_model_len is not None:
        card["max_model_len"] = max_model_len
    return card


def _chat_delta(index: int, delta: Json, finish_reason: FinishReason | None) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _completion_choice(index: int, text: str, finish_reason: FinishReason | None) -> Json:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
