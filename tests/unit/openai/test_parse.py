"""Bodies become requests, or a 400 that names what is wrong."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from flowprefill.errors import BodyTooLarge, InvalidRequest
from flowprefill.openai.errors import answer_for
from flowprefill.openai.parse import decode_object, parse_request, read_body
from flowprefill.openai.requests import ChatCompletionRequest, CompletionRequest
from flowprefill.openai.unsupported import UNSUPPORTED

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}


def chat(**changes: Any) -> ChatCompletionRequest:
    request = parse_request("chat", json.dumps(CHAT | changes).encode()).request
    assert isinstance(request, ChatCompletionRequest)
    return request


def completion(**changes: Any) -> CompletionRequest:
    request = parse_request("completions", json.dumps(COMPLETION | changes).encode()).request
    assert isinstance(request, CompletionRequest)
    return request


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"   ",
        b"\xff",
        b"[]",
        b"null",
        b'"text"',
        b"3",
        b"[" * 2000 + b"]" * 2000,
        b'{"prompt":' * 2000 + b"1" + b"}" * 2000,
        b'{"model": "m", "prompt": "a"',
        b'{"model": "m", "prompt": "a", "temperature": NaN}',
        b'{"model": "m", "prompt": "a", "temperature": Infinity}',
        b'{"model": "m", "prompt": "\\ud800"}',
        b"model=m&prompt=a",
        b"--boundary\r\nContent-Disposition: form-data\r\n\r\nx\r\n--boundary--",
        b'{"model": 1}',
        b'{"model": "m"}',
        b'{"model": "m", "prompt": null}',
        b'{"model": "", "prompt": "a"}',
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_bodies_that_broke_other_servers_are_400_in_the_envelope(endpoint: Any, raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_request(endpoint, raw)
    answer = answer_for(caught.value)
    assert answer.status == 400
    envelope = json.loads(answer.body())
    assert set(envelope) == {"error"}
    assert set(envelope["error"]) == {"message", "type", "param", "code"}
    assert envelope["error"]["type"] == "invalid_request_error"
    assert "Traceback" not in envelope["error"]["message"]
    assert len(envelope["error"]["message"]) < 1000


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"n": "2"}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**40}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": "x" * 1001}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, -2]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"vllm_xargs": []}, "vllm_xargs"),
        ({"kv_transfer_params": "x"}, "kv_transfer_params"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"min_tokens": 5, "max_tokens": 3}, None),
        ({"stream_options": {"include_usage": True}}, None),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_name(changes: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**changes)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "tools"),
        ({"role": "function", "content": "x"}, "tools"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "tool_calls"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "function_call"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "image_url"),
        ({"role": "user", "content": [{"type": "text"}]}, "text"),
        ({"role": "user", "content": []}, "parts"),
        ({"role": "user", "content": 3}, "content"),
        ({"role": "user"}, "content"),
        ({"role": "king", "content": "x"}, "role"),
        ("hello", "messages[0]"),
    ],
)
def test_a_message_that_is_not_text_is_refused(message: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=[message])
    assert caught.value.param is not None
    assert caught.value.param.startswith("messages")
    assert words in str(caught.value)


ASKS_FOR_SOMETHING: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "response_format": {"type": "json_object"},
    "structured_outputs": {"json": {}},
    "modalities": ["text", "audio"],
    "reasoning_effort": "high",
    "verbosity": "low",
    "echo": True,
    "logprobs": 0,
    "top_logprobs": 5,
    "prompt_logprobs": 0,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "suffix": "after",
    "logit_bias": {"50256": -100},
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "length_penalty": 2.0,
    "top_k": 40,
    "min_p": 0.1,
    "use_beam_search": True,
    "logits_processors": ["x"],
    "bad_words": ["x"],
    "truncate_prompt_tokens": 10,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "chat_template_kwargs": {"a": 1},
    "documents": [{"text": "x"}],
    "add_generation_prompt": False,
    "continue_final_message": True,
    "store": True,
}


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    value = ASKS_FOR_SOMETHING.get(name, "something")
    with pytest.raises(InvalidRequest) as caught:
        chat(**{name: value})
    assert caught.value.param == name
    assert caught.value.code == "unsupported_parameter"
    assert name in str(caught.value)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_null_and_values_that_ask_for_nothing_pass(name: str) -> None:
    for value in (None, *UNSUPPORTED[name].accepted):
        chat(**{name: value})


def test_logprobs_zero_is_not_false() -> None:
    chat(logprobs=False)
    with pytest.raises(InvalidRequest):
        completion(logprobs=0)  # asks for the chosen token's log probability


def test_best_of_passes_only_where_it_equals_n() -> None:
    completion(best_of=1)
    completion(best_of=2, n=2)
    with pytest.raises(InvalidRequest) as caught:
        completion(best_of=3, n=2)
    assert caught.value.param == "best_of"


def test_harmless_and_unknown_fields_pass() -> None:
    chat(
        user="u",
        metadata={"a": "b"},
        service_tier="flex",
        priority=3,
        store=False,
        safety_identifier="x",
        prompt_cache_key="y",
        parallel_tool_calls=True,
        something_new={"a": [1]},
    )


def test_prompts_of_every_form_become_a_list_of_prompts() -> None:
    assert completion(prompt="a").prompt == ["a"]
    assert completion(prompt=["a", "b"]).prompt == ["a", "b"]
    assert completion(prompt=[1, 2, 3]).prompt == [[1, 2, 3]]
    assert completion(prompt=[[1, 2], [3]]).prompt == [[1, 2], [3]]
    assert completion(prompt=list(range(5000))).prompt == [list(range(5000))]


def test_text_parts_are_joined_by_a_line_feed() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = chat(messages=[{"role": "user", "content": parts, "name": "ann"}])
    assert request.template_messages() == [{"role": "user", "content": "one\ntwo", "name": "ann"}]


def test_limits_default_as_in_openai() -> None:
    assert completion().token_limit is None
    assert completion().default_limit == 16
    assert chat().token_limit is None
    assert chat().default_limit is None
    assert chat(max_tokens=5).token_limit == 5
    assert chat(max_tokens=5, max_completion_tokens=7).token_limit == 7


def test_null_counts_as_absent() -> None:
    request = chat(temperature=None, max_tokens=None, stop=None, stream=None, stream_options=None, n=None)
    assert (request.temperature, request.token_limit, request.stop, request.stream, request.n) == (
        1.0,
        None,
        [],
        False,
        1,
    )


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(temperature="x" * 100_000)
    assert len(str(caught.value)) < 300


async def _chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_a_body_above_the_limit_is_refused_before_it_is_read() -> None:
    read: list[bytes] = []

    async def chunks() -> AsyncIterator[bytes]:
        for part in (b"x" * 60, b"x" * 60, b"x" * 60):
            read.append(part)
            yield part

    with pytest.raises(BodyTooLarge):
        await read_body(chunks(), content_length="180", limit_bytes=100)
    assert read == []
    with pytest.raises(BodyTooLarge):
        await read_body(chunks(), limit_bytes=100)
    assert len(read) == 2
    assert await read_body(_chunks(b"ab", b"cd"), content_length="4", limit_bytes=4) == b"abcd"


@pytest.mark.parametrize("length", ["-1", "abc", "1e9", "٣", "9" * 30])
async def test_an_odd_content_length_changes_nothing(length: str) -> None:
    assert await read_body(_chunks(b"ab"), content_length=length, limit_bytes=4) == b"ab"


def test_nesting_is_bounded() -> None:
    deep = b'{"metadata":' + b"[" * 150 + b"]" * 150 + b"}"
    assert "metadata" in decode_object(deep)
    with pytest.raises(InvalidRequest):
        decode_object(b'{"metadata":' + b"[" * 300 + b"]" * 300 + b"}")
