"""From bytes to a checked request. Every failure is an `InvalidRequest` or `BodyTooLarge`, whatever the bytes."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pydantic_core
from pydantic import ValidationError

from flowprefill.errors import BodyTooLarge, InvalidRequest
from flowprefill.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    Endpoint,
    GenerationRequest,
)
from flowprefill.openai.unsupported import UNSUPPORTED, refuse_unsupported

log = logging.getLogger(__name__)

DEFAULT_BODY_LIMIT_BYTES = 16 * 2**20

_LENGTH = re.compile(r"[0-9]{1,18}")
_HARMLESS = frozenset(
    {"metadata", "prompt_cache_key", "safety_identifier", "parallel_tool_calls", "best_of", "request_id"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A checked request beside the JSON object it came from (what a proxy forwards)."""

    endpoint: Endpoint
    request: GenerationRequest
    body: dict[str, Any]  # Any: the client's JSON object


async def read_body(
    chunks: AsyncIterator[bytes],
    *,
    content_length: str | None = None,
    limit_bytes: int = DEFAULT_BODY_LIMIT_BYTES,
) -> bytes:
    """The whole body, at most `limit_bytes` long; raises `BodyTooLarge` without reading further.

    A `content_length` above the limit is refused before the first chunk.
    """
    announced = int(content_length) if content_length and _LENGTH.fullmatch(content_length) else 0
    if announced > limit_bytes:
        raise BodyTooLarge(f"the body has {announced} bytes; accepted are at most {limit_bytes} bytes")
    parts: list[bytes] = []
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > limit_bytes:
            raise BodyTooLarge(f"the body has more than {limit_bytes} bytes, which is the most accepted")
        parts.append(chunk)
    return b"".join(parts)


def decode_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Nesting is bounded (200 levels), NaN and infinities are refused."""
    if not raw.strip():
        raise InvalidRequest("the body is empty; accepted is a JSON object")
    try:
        value = pydantic_core.from_json(raw, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise InvalidRequest(
            f"the body is not valid JSON: {str(error)[:200]}; accepted is a JSON object"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body is a JSON {_json_name(value)}; accepted is a JSON object")
    return value


def parse_request(endpoint: Endpoint, raw: bytes) -> ParsedRequest:
    """Decode, refuse what is unsupported, validate. Raises `InvalidRequest` with `param` set where one is at fault."""
    return check_request(endpoint, decode_object(raw))


def check_request(endpoint: Endpoint, body: dict[str, Any]) -> ParsedRequest:
    """As `parse_request`, for a JSON object that is decoded already."""
    refuse_unsupported(body)
    model: type[CompletionRequest] | type[ChatCompletionRequest]
    model = CompletionRequest if endpoint == "completions" else ChatCompletionRequest
    try:
        request = model.model_validate(body)
    except ValidationError as error:
        raise _invalid(error) from None
    unknown = [name[:64] for name in body if not _is_known(name, model)]
    if unknown:
        log.debug("unknown fields ignored", extra={"fields": unknown[:16], "endpoint": endpoint})
    return ParsedRequest(endpoint=endpoint, request=request, body=body)


def _is_known(name: str, model: type[CompletionRequest] | type[ChatCompletionRequest]) -> bool:
    return name in model.model_fields or name in UNSUPPORTED or name in _HARMLESS


def _invalid(error: ValidationError) -> InvalidRequest:
    """The first violation as a message with the field's path and the value seen (cut short)."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = ""
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    reason = first["msg"].removeprefix("Value error, ")
    code = "missing_required_parameter" if first["type"] == "missing" else None
    if first["type"] == "missing":
        return InvalidRequest(
            f"{path or 'a field'} is missing; it is required", param=path or None, code=code
        )
    seen = repr(first["input"])
    shown = seen if len(seen) <= 100 else seen[:97] + "..."
    if not path:
        return InvalidRequest(reason)
    return InvalidRequest(f"{path} is not valid: {reason}; got {shown}", param=path)


def _json_name(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case _:
            return "array"
