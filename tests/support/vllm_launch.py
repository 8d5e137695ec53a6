"""Launches of vLLM that tests vary, and command lines read the way vLLM reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowprefill.engines.models import ResolvedModel
from flowprefill.server.vllm.flags import Launch, command_line
from support.pods import live_config, pod_config


def launch(role: str = "colocated", *, config: dict[str, Any] | None = None, **changes: Any) -> Launch:
    """A launch on a GPU, unless told otherwise. `config` changes the pod configuration."""
    fields: dict[str, Any] = {
        "role": role,
        "config": pod_config(**({"engine": {"type": "vllm"}} | (config or {}))),
        "live": live_config(),
        "device": "cuda",
        "model": ResolvedModel(path=Path("/models/m"), name="org/m", revision="abc"),
        "model_len": 8192,
        "kv_cache_tokens": None,
        "host": "10.0.0.1",
        "port": 8000,
    }
    return Launch(**{**fields, **changes})


def values(of: Launch, *extra: str) -> dict[str, str | None]:
    """The flags of a command line; the last of a name wins, as in vLLM."""
    words = command_line(of, extra)
    assert words[:2] == ("serve", "/models/m")
    found: dict[str, str | None] = {}
    last = ""
    for word in words[2:]:
        if word.startswith("-"):
            last, equals, value = word.partition("=")
            found[last] = value if equals else None
        else:
            found[last] = word
    return found


def json_value(of: Launch, name: str, *extra: str) -> Any:
    """The JSON that a flag carries."""
    return json.loads(values(of, *extra)[name] or "")
