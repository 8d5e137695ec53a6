from __future__ import annotations

from flowprefill.proxy import content
from flowprefill.proxy.merge import Merger, sum_usages


def chunk(index: int, text: str, **more: object) -> dict:
    return {"id": f"id{text}", "object": "text_completion", "created": 5, "model": "m", **more} | {
        "choices": [{"index": index, "text": text}]
    }


def test_choices_are_numbered_prompt_by_prompt_under_one_id():
    merger = Merger(num_prompts=2, num_choices=3, include_usage=False)
    first = merger.chunk(1, chunk(2, "a"))
    second = merger.chunk(0, chunk(0, "b"))
    assert (first["choices"][0]["index"], second["choices"][0]["index"]) == (5, 0)
    assert first["id"] == second["id"] == "ida"


def test_usage_is_one_sum_at_the_end():
    merger = Merger(num_prompts=2, num_choices=1, include_usage=True)
    assert merger.chunk(0, chunk(0, "a"))["usage"] is None
    details = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    assert merger.chunk(0, {"choices": [], "usage": details}) is None
    assert merger.usage_chunk() is None
    assert merger.chunk(1, {"choices": [], "usage": {"prompt_tokens": 4}}) is None
    usage = merger.usage_chunk()
    assert usage["usage"] == {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}
    assert usage["choices"] == []


def test_sums_skip_what_is_no_number():
    assert sum_usages([{"a": 1, "b": None, "c": True}, {"a": 2}]) == {"a": 3}


def test_a_role_chunk_is_no_token_and_text_is():
    def delta(**fields: object) -> dict:
        return {"choices": [{"index": 0, "delta": fields}]}

    assert not content.has_token("chat", delta(role="assistant", content=""))
    assert not content.has_token("chat", {"choices": [], "usage": {}})
    assert content.has_token("chat", delta(content="x"))
    assert content.has_token("chat", delta(reasoning_content="x"))
    assert content.has_token("completions", chunk(0, "x"))
    assert not content.has_token("completions", chunk(0, ""))


def test_kv_parameters_of_pods_do_not_reach_the_client():
    data = '{"id":"x","kv_transfer_params":{"remote_host":"p0"},"choices":[]}'
    assert content.for_client(data) == '{"id":"x","choices":[]}'
    assert content.for_client('{"id":"x"}') == '{"id":"x"}'


def test_events_go_out_with_one_data_line_for_each_line():
    assert content.encode_events(["a", "b\nc"]) == b"data: a\n\ndata: b\ndata: c\n\n"
