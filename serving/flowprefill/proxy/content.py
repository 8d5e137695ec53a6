"""Reading the data of a pod's events: is there a token in it, is it an error, what must not reach the client. Pure."""

from __future__ import annotations

import json
from typing import Any

from flowprefill.openai.requests import Endpoint
from flowprefill.proxy.legs import KV_PARAMS

TOKEN_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
"""Fields of a chat delta whose presence means that a token was generated."""


def parse(data: str) -> dict[str, Any] | None:  # Any: a pod's JSON, read key by key
    """The JSON object of an event; None when it is none."""
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def has_token(api: Endpoint, chunk: dict[str, Any]) -> bool:
    """Whether a chunk carries generated text. A chat's first chunk, which only names the role, does not."""
    choices = chunk.get("choices")
    if not isinstance(choices, list):
        return False
    for choice in choices:
        if not isinstance(choice, dict):
            continue
        if api == "completions":
            if choice.get("text"):
                return True
        else:
            delta = choice.get("delta")
            if isinstance(delta, dict) and any(delta.get(field) for field in TOKEN_FIELDS):
                return True
    return False


def is_error(data: str) -> bool:
    """Whether an event reports an error instead of a chunk."""
    return '"error"' in data[:40] and bool((parse(data) or {}).get("error"))


def for_client(data: str) -> str:
    """An event without what only proxy and pods talk about."""
    if f'"{KV_PARAMS}"' not in data:
        return data
    chunk = parse(data)
    if chunk is None:
        return data
    chunk.pop(KV_PARAMS, None)
    return json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))


def encode_events(events: list[str]) -> bytes:
    """Events as they go over the wire."""
    lines = ("data: " + data.replace("\n", "\ndata: ") + "\n\n" for data in events)
    return "".join(lines).encode("utf-8", "surrogatepass")
