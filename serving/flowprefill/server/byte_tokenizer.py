"""The tokenizer of simulated engines: a token a byte, so that lengths are known without any model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class ByteTokenizer:
    """Tokens 0 to 255 are bytes; the simulated model's other tokens are shown as words."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [byte % self._vocab_size for byte in text.encode()]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + "assistant: ")

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(t) if 32 <= t < 127 else f" word{t}" for t in token_ids)
