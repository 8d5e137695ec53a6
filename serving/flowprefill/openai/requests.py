"""The request bodies of `/v1/completions` and `/v1/chat/completions`.

Fields with a null value count as absent. `user`, `metadata`, `service_tier`, `priority`, `store: false`,
`prompt_cache_key` and `safety_identifier` are accepted and do not change the answer (`service_tier` may choose
the SLO class). What would change the answer but is not supported is refused by `flowprefill.openai.unsupported`;
fields that neither OpenAI nor vLLM defines are ignored with a debug log, as vLLM does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_CHOICES = 16
"""Most choices (`n`) of one prompt."""
MAX_PROMPTS = 64
"""Most prompts in one completion request."""
MAX_STOPS = 4
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` in `/v1/completions`; chat has none (the rest of the context)."""

Prompt = str | list[int]
Endpoint = Literal["completions", "chat"]


def _prompts(value: object) -> list[Prompt]:
    """One prompt or many, as text or token ids, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(
            "accepted are a string, a list of strings, a list of token ids, a list of such lists"
        )
    if not value:
        raise ValueError("an empty list holds no prompt; give at least one string or token id")
    if all(type(item) is int for item in value):
        return [_token_ids(value)]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"{len(value)} prompts; accepted are at most {MAX_PROMPTS} in one request")
    if all(isinstance(item, str) for item in value):
        return list(value)
    if all(isinstance(item, list) for item in value):
        return [_token_ids(item) for item in value]
    raise ValueError("a list of prompts holds only strings, only token ids, or only lists of token ids")


def _token_ids(value: list[Any]) -> list[int]:
    if not value:
        raise ValueError("an empty list of token ids; a prompt has at least one token")
    if not all(type(item) is int and item >= 0 for item in value):
        raise ValueError("token ids are integers from 0")
    return value


def _stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("accepted are a non-empty string or a list of them")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"{len(stops)} stop strings; accepted are at most {MAX_STOPS}")
    if any(len(stop) > 1000 for stop in stops):
        raise ValueError("a stop string has at most 1000 characters")
    return stops


def _content(value: object) -> str:
    """Message content as one text: a string, or text parts joined by a line feed (as vLLM does)."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("accepted are a string or a list of parts of type 'text'")
    texts: list[str] = []
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ValueError("a content part is an object with a 'type'")
        if part["type"] != "text":
            raise ValueError(f"a part of type {part['type'][:40]!r} is not supported; accepted is 'text'")
        if not isinstance(part.get("text"), str):
            raise ValueError("a part of type 'text' has a string 'text'")
        texts.append(part["text"])
    if not texts:
        raise ValueError("an empty list of parts; give at least one")
    return "\n".join(texts)


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: object) -> object:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


class StreamOptions(_Model):
    """`include_usage` adds a last chunk with the usage and no choices."""

    include_usage: bool = False


class ChatMessage(_Model):
    """One message; `content` is its text, parts already joined."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]
    name: str | None = Field(default=None, max_length=64)

    @model_validator(mode="before")
    @classmethod
    def _no_tools(cls, data: object) -> object:
        if isinstance(data, dict):
            if data.get("role") in ("tool", "function"):
                raise ValueError(f"messages of role {data['role']!r} are not supported: tools are not")
            for field in ("tool_calls", "function_call"):
                if data.get(field):
                    raise ValueError(f"{field!r} in a message is not supported: tools are not")
        return data


class _Generation(_Model):
    """What both endpoints share. Numbers are bounded as OpenAI bounds them."""

    model: str = Field(min_length=1, max_length=512)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    min_tokens: int = Field(default=0, ge=0, le=2**31 - 1)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: Annotated[list[str], BeforeValidator(_stops)] = Field(default_factory=list)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list, max_length=64)
    ignore_eos: bool = False
    user: str | None = None
    service_tier: str | None = Field(default=None, max_length=64)
    priority: int | None = None
    vllm_xargs: dict[str, Any] = Field(default_factory=dict)  # Any: bounded JSON, read key by key
    kv_transfer_params: dict[str, Any] | None = None  # Any: vLLM's and ours differ; the server validates

    @property
    def token_limit(self) -> int | None:
        """The client's own limit on tokens to generate; None when it set none."""
        return self.max_tokens

    @property
    def default_limit(self) -> int | None:
        """The limit when the client set none; None means the rest of the context."""
        return None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only accepted with stream: true")
        limit = self.token_limit
        if limit is not None and self.min_tokens > limit:
            raise ValueError(f"min_tokens is {self.min_tokens}, above the limit of {limit} tokens")
        return self


class CompletionRequest(_Generation):
    """`POST /v1/completions`."""

    prompt: Annotated[list[Prompt], BeforeValidator(_prompts)]
    add_special_tokens: bool = True

    @property
    def endpoint(self) -> Endpoint:
        return "completions"

    @property
    def default_limit(self) -> int:
        return DEFAULT_COMPLETION_TOKENS


class ChatCompletionRequest(_Generation):
    """`POST /v1/chat/completions`. `max_completion_tokens` wins over `max_tokens`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)

    @property
    def endpoint(self) -> Endpoint:
        return "chat"

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def template_messages(self) -> list[dict[str, str]]:
        """The messages as a chat template reads them."""
        return [
            {"role": message.role, "content": message.content}
            | ({} if message.name is None else {"name": message.name})
            for message in self.messages
        ]


GenerationRequest = CompletionRequest | ChatCompletionRequest
