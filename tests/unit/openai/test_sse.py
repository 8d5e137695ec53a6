"""Streams of events, written and read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowprefill.errors import UpstreamFailed
from flowprefill.openai.sse import DONE, DONE_DATA, EventDecoder, encode


def test_an_event_is_one_data_line_whatever_the_text() -> None:
    encoded = encode({"text": "line\nfeed \r\n ünï \u2028 data: x"})
    assert encoded.startswith(b"data: ")
    assert encoded.endswith(b"\n\n")
    assert b"\n" not in encoded[:-2]
    assert json.loads(encoded[6:])["text"] == "line\nfeed \r\n ünï \u2028 data: x"


@given(
    st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=8), max_size=3), max_size=5),
    st.integers(1, 9),
)
def test_events_survive_every_chunking(payloads: list[dict[str, str]], size: int) -> None:
    wire = b"".join(encode(p) for p in payloads) + DONE
    decoder = EventDecoder()
    read = [event for at in range(0, len(wire), size) for event in decoder.feed(wire[at : at + size])]
    assert [json.loads(event) for event in read[:-1]] == payloads
    assert read[-1] == DONE_DATA


def test_comments_other_fields_and_crlf_are_understood() -> None:
    wire = b': ping\r\n\r\nevent: x\r\nid: 3\r\ndata: {"a"\r\ndata: :1}\r\n\r\ndata:[DONE]\r\n\r\n'
    assert EventDecoder().feed(wire) == ['{"a"\n:1}', "[DONE]"]


@pytest.mark.parametrize("chunk", [b"data: " + b"x" * 20 + b"\n", b"x" * 20])
def test_an_endless_event_is_an_error(chunk: bytes) -> None:
    decoder = EventDecoder(max_event_bytes=100)
    assert decoder.feed(chunk) == []
    with pytest.raises(UpstreamFailed):
        decoder.feed(chunk * 20)
