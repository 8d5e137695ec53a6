"""The simulated engine's tokenizer: it needs no files, and what it decodes can be read.

A text is its UTF-8 bytes, one token each; the ids above are words, which only the model says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

EOS_TOKEN_ID = 256
_FIRST_WORD = 257
_SYLLABLES = ("ba", "de", "fi", "go", "hu", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "wu", "za")
WORDS = tuple(f" {a}{b}{c}" for a in _SYLLABLES for b in _SYLLABLES for c in _SYLLABLES)
VOCAB_SIZE = _FIRST_WORD + len(WORDS)


class SimulatedTokenizer:
    """Implements what servers need of a tokenizer (`engines.tokenizer.Tokenizer`)."""

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + "assistant:")

    def decode(self, token_ids: Sequence[int]) -> str:
        parts = b""
        for token_id in token_ids:
            if token_id < EOS_TOKEN_ID:
                parts += bytes([token_id])
            elif token_id >= _FIRST_WORD:
                parts += WORDS[token_id - _FIRST_WORD].encode()
        return parts.decode(errors="replace")
