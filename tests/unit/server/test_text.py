"""Tokens become text piece by piece, and prompts are bounded before anything is computed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from flowprefill.engines.tokenizer import Tokenizer
from flowprefill.errors import ContextLengthExceeded, InvalidRequest
from flowprefill.openai.parse import parse_request
from flowprefill.server.text import MOST_BYTES_PER_TOKEN, Texts, TextStream
from support.pods import WordTokenizer


def byte_level() -> Tokenizer:
    """A real byte-level tokenizer without merges: one token a byte, so characters span several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    return Tokenizer(inner, settings={"eos_token": "<end>"}, template=None)


TOKENIZER = byte_level()


def streamed(token_ids: list[int], context: list[int] | None = None) -> list[str]:
    stream = TextStream(TOKENIZER, context or [])
    return [*(stream.feed(token_id) for token_id in token_ids), stream.flush()]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20))
def test_pieces_add_up_to_the_whole_text(text: str) -> None:
    token_ids = TOKENIZER.encode(text)
    assert "".join(streamed(token_ids, TOKENIZER.encode("before "))) == text


def test_a_character_leaves_when_it_is_complete() -> None:
    pieces = streamed(TOKENIZER.encode("aé🦊b"))
    assert pieces == ["a", "", "é", "", "", "", "🦊", "b", ""]


def test_an_incomplete_character_at_the_end_shows_as_a_replacement() -> None:
    pieces = streamed(TOKENIZER.encode("a🦊")[:-1])
    assert "".join(pieces) == "a\ufffd"


def test_special_tokens_have_no_text_and_cost_no_memory() -> None:
    end = TOKENIZER.token_id("<end>")
    assert end is not None
    stream = TextStream(TOKENIZER)
    assert all(stream.feed(end) == "" for _ in range(1000))
    assert len(stream._window) <= TextStream.MAX_HELD_TOKENS
    assert [stream.feed(token_id) for token_id in TOKENIZER.encode("hi")] == ["h", "i"]


def test_bytes_that_never_make_a_character_are_not_held_for_ever() -> None:
    (continuation,) = TOKENIZER.encode("é")[1:]
    stream = TextStream(TOKENIZER)
    sent = "".join(stream.feed(continuation) for _ in range(200))
    assert len(sent) > 100
    assert len(stream._window) <= 2 * TextStream.MAX_HELD_TOKENS


def request(**body: Any) -> Any:
    return parse_request("completions", json.dumps({"model": "m", "prompt": "x"} | body).encode()).request


async def test_a_prompt_that_leaves_no_room_for_its_answer_is_refused() -> None:
    texts = Texts(WordTokenizer(), max_model_len=100)
    assert texts.room(request(), 90, 10) == 10
    for num_prompt_tokens, asked in [(90, 11), (100, None), (100, 1), (5000, None)]:
        with pytest.raises(ContextLengthExceeded) as caught:
            texts.room(request(), num_prompt_tokens, asked)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "prompt"
    # Without a limit of the client's, the default shrinks to what is left.
    assert texts.room(request(), 50, None) == 16
    assert texts.room(request(), 95, None) == 5


async def test_token_ids_are_taken_as_they_are_and_checked_against_the_vocabulary() -> None:
    texts = Texts(WordTokenizer(), max_model_len=100)
    assert await texts.prompts(request(prompt=[[1, 2], [999]])) == [[1, 2], [999]]
    with pytest.raises(InvalidRequest, match="1000"):
        await texts.prompts(request(prompt=[1, 1000]))


async def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no tokens"):
        await Texts(WordTokenizer(), max_model_len=100).prompts(request(prompt=""))


async def test_long_texts_are_tokenized_in_a_thread_with_the_same_result() -> None:
    texts = Texts(WordTokenizer(), max_model_len=100_000)
    long = "word " * 2000
    assert await texts.prompts(request(prompt=[long, "short"])) == [
        WordTokenizer().encode(long),
        WordTokenizer().encode("short"),
    ]
    texts.close()


class Uncountable(WordTokenizer):
    """Fails the test when it is asked to count."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise AssertionError(f"{len(text)} characters were tokenized")

    encode_chat = encode  # type: ignore[assignment]


@pytest.mark.parametrize("chat", [False, True])
async def test_what_can_never_fit_is_refused_without_being_counted(chat: bool) -> None:
    text = "x" * (MOST_BYTES_PER_TOKEN * 100 + 1)
    body = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    request = parse_request(
        "chat" if chat else "completions", json.dumps({"model": "m", **body}).encode()
    ).request
    with pytest.raises(
        InvalidRequest, match=f"100 tokens, but the prompt has {len(text)} characters"
    ) as caught:
        await Texts(Uncountable(), max_model_len=100).prompts(request)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == ("messages" if chat else "prompt")
