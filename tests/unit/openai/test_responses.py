"""Answers have OpenAI's shape, and a folded stream equals the whole answer."""

from __future__ import annotations

from typing import Any

import pytest

from flowprefill.errors import UpstreamFailed
from flowprefill.openai.collect import ResponseCollector
from flowprefill.openai.headers import end_to_end, request_id_from
from flowprefill.openai.requests import Endpoint
from flowprefill.openai.responses import Choice, ResponseShape, Usage

USAGE = Usage(prompt_tokens=9, completion_tokens=4, cached_tokens=3)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_folded_stream_is_the_whole_answer(endpoint: Endpoint) -> None:
    shape = ResponseShape.new(endpoint, "m", include_usage=True)
    collector = ResponseCollector(endpoint)
    chunks: list[Any] = [
        shape.role_chunk(0),
        shape.role_chunk(1),
        shape.text_chunk(0, "one "),
        shape.text_chunk(1, "uno "),
        shape.text_chunk(0, "two", "stop"),
        shape.text_chunk(1, "", "length"),
        shape.usage_chunk(USAGE),
    ]
    for chunk in chunks:
        if chunk is not None:
            collector.add(chunk)
    whole = shape.whole(
        [
            Choice(index=0, text="one two", finish_reason="stop"),
            Choice(index=1, text="uno ", finish_reason="length"),
        ],
        USAGE,
    )
    assert collector.response() == whole


def test_a_stream_that_ends_early_is_an_error() -> None:
    collector = ResponseCollector("chat")
    with pytest.raises(UpstreamFailed):
        collector.response()
    collector.add(ResponseShape.new("chat", "m").text_chunk(0, "half"))
    with pytest.raises(UpstreamFailed):
        collector.response()


@pytest.mark.parametrize("chunk", [{}, {"choices": 3}, {"choices": [{}]}, {"choices": [{"index": 0}]}])
def test_a_chunk_of_another_shape_is_an_error(chunk: dict[str, Any]) -> None:
    with pytest.raises(UpstreamFailed):
        ResponseCollector("chat").add(chunk)


def test_usage_adds_up() -> None:
    assert USAGE.json() == {
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_a_request_id_is_kept_only_when_it_is_harmless() -> None:
    assert request_id_from("abc-123.x/y:z") == "abc-123.x/y:z"
    for odd in (None, "", "a" * 129, "a b", "a\r\nset-cookie: x", "\u00fc"):
        fresh = request_id_from(odd)
        assert fresh != odd
        assert len(fresh) == 32


def test_hop_by_hop_headers_stay_on_their_hop() -> None:
    headers = [
        ("Transfer-Encoding", "chunked"),
        ("Connection", "close, X-Mine"),
        ("X-Mine", "1"),
        ("Content-Type", "application/json"),
        ("Keep-Alive", "3"),
        ("X-Other", "2"),
    ]
    assert end_to_end(headers) == [("Content-Type", "application/json"), ("X-Other", "2")]
