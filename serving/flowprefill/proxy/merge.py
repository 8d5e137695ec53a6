"""Several prompts of one completions request, answered as one. Pure.

Each prompt goes its own way through the pods; a request with several is never forwarded as it is. Choices of prompt
i with n choices each get the indices i n to i n + n - 1, as OpenAI numbers them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]  # Any: an upstream's JSON


class Merger:
    """Makes chunks of several answers look like one answer's: one id, one numbering, one usage."""

    def __init__(self, *, num_prompts: int, num_choices: int, include_usage: bool) -> None:
        self._num_choices = num_choices
        self._num_prompts = num_prompts
        self._include_usage = include_usage
        self._head: Json | None = None
        self._usages: dict[int, Mapping[str, Any]] = {}

    def chunk(self, prompt: int, chunk: Json) -> Json | None:
        """A chunk of `prompt`'s answer as the client gets it; None when it holds nothing for the client."""
        if self._head is None:
            self._head = {key: chunk[key] for key in ("id", "object", "created", "model") if key in chunk}
        usage = chunk.get("usage")
        if isinstance(usage, Mapping):
            self._usages[prompt] = usage
        choices = chunk.get("choices")
        if not choices:
            return None
        first = prompt * self._num_choices
        moved = [{**choice, "index": first + int(choice.get("index", 0))} for choice in choices]
        merged = {**chunk, **self._head, "choices": moved}
        merged.pop("usage", None)
        if self._include_usage:
            merged["usage"] = None
        return merged

    def usage_chunk(self) -> Json | None:
        """The last chunk: what all prompts used together; None when the pods did not say."""
        if self._head is None or len(self._usages) < self._num_prompts:
            return None
        return {**self._head, "choices": [], "usage": sum_usages(list(self._usages.values()))}


def sum_usages(usages: list[Mapping[str, Any]]) -> Json:
    """Numbers added field by field, nested details too; what is not a number is left out."""
    total: Json = {}
    for usage in usages:
        for key, value in usage.items():
            if isinstance(value, Mapping):
                total[key] = sum_usages([total.get(key, {}), value])
            elif isinstance(value, int) and not isinstance(value, bool):
                total[key] = total.get(key, 0) + value
    return total
