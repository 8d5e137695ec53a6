from __future__ import annotations

import copy

import pytest

from flowprefill.proxy.legs import colocated_body, decode_body, kv_params_of, leg_headers, prefill_body

CLIENT = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 50,
    "max_completion_tokens": 40,
    "min_tokens": 10,
    "n": 3,
    "seed": 7,
    "temperature": 0.3,
    "stop": ["x"],
    "vllm_xargs": {"arrival": 1.0, "ttft_slo": 9.0, "tbt_slo": 0.1, "own": "kept"},
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"},
    "unknown_field": [1],
}


def test_the_prefill_leg_is_one_unstreamed_token_with_kv_kept():
    leg = prefill_body(CLIENT, chat=True, budget_s=0.75, target_s=1.0, slo_class="chat")
    assert leg["stream"] is False
    assert "stream_options" not in leg
    assert (leg["max_tokens"], leg["max_completion_tokens"], leg["min_tokens"], leg["n"]) == (1, 1, 1, 1)
    assert leg["kv_transfer_params"] == {"do_remote_decode": True}
    assert leg["vllm_xargs"] == {
        "own": "kept",
        "ttft_slo": 0.75,
        "ttft_target": 1.0,
        "slo_class": "chat",
        "decode_max_tokens": 40,
    }
    for field in ("model", "messages", "seed", "temperature", "stop", "unknown_field"):
        assert leg[field] == CLIENT[field]


def test_a_completions_prefill_leg_has_no_chat_field_and_best_of_goes():
    body = {"model": "m", "prompt": "p", "best_of": 2, "n": 2}
    leg = prefill_body(body, chat=False, budget_s=-0.5, target_s=1.0, slo_class="c")
    assert "max_completion_tokens" not in leg
    assert "best_of" not in leg
    assert "min_tokens" not in leg
    assert leg["vllm_xargs"] == {"ttft_slo": -0.5, "ttft_target": 1.0, "slo_class": "c"}


def test_the_decode_leg_is_the_clients_request_with_the_prefills_kv():
    leg = decode_body(CLIENT, {"remote_host": "p0"}, slo_class="chat")
    assert leg["kv_transfer_params"] == {"remote_host": "p0"}
    assert leg["stream"] is True
    assert leg["stream_options"] == {"include_usage": True}
    assert leg["vllm_xargs"] == {"own": "kept", "slo_class": "chat"}
    for field in ("max_tokens", "max_completion_tokens", "min_tokens", "n", "seed"):
        assert leg[field] == CLIENT[field]


def test_without_kv_parameters_of_the_prefill_leg_decode_gets_none_not_the_clients():
    leg = decode_body({**CLIENT, "kv_transfer_params": {"remote_host": "evil"}}, {}, slo_class="chat")
    assert "kv_transfer_params" not in leg


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ({"kv_transfer_params": {"remote_host": "p0"}}, {"remote_host": "p0"}),
        ({"kv_transfer_params": None}, {}),
        ({}, None),
        ({"kv_transfer_params": "p0"}, None),
    ],
)
def test_a_null_of_the_prefill_leg_is_an_answer_and_a_missing_field_is_none(answer, found):
    assert kv_params_of(answer) == found


@pytest.mark.parametrize("leg_of", [decode_body, None])
def test_a_unary_request_is_streamed_inside_with_usage(leg_of):
    body = {"model": "m", "prompt": "p"}
    if leg_of is None:
        leg = colocated_body(body, budget_s=1.0, target_s=1.0, slo_class="c")
    else:
        leg = leg_of(body, {}, slo_class="c")
    assert leg["stream"] is True
    assert leg["stream_options"] == {"include_usage": True}


def test_the_colocated_leg_has_a_budget_and_none_of_the_clients_kv_parameters():
    leg = colocated_body(CLIENT, budget_s=0.5, target_s=1.0, slo_class="chat")
    assert "kv_transfer_params" not in leg
    assert leg["vllm_xargs"]["ttft_slo"] == 0.5
    assert leg["max_completion_tokens"] == 40


def test_making_legs_leaves_the_clients_body_alone():
    before = copy.deepcopy(CLIENT)
    prefill_body(CLIENT, chat=True, budget_s=1.0, target_s=1.0, slo_class="c")
    decode_body(CLIENT, {}, slo_class="c")
    colocated_body(CLIENT, budget_s=1.0, target_s=1.0, slo_class="c")
    assert before == CLIENT


def test_only_listed_headers_reach_a_pod():
    headers = leg_headers(
        [
            ("authorization", "Bearer k"),
            ("traceparent", "00-1"),
            ("x-prefiller-host-port", "evil:1"),
            ("x-data-parallel-host-port", "evil:1"),
            ("x-gateway-destination-endpoint", "evil:1"),
            ("x-flowprefill-slo-class", "chat"),
            ("connection", "close, traceparent"),
            ("transfer-encoding", "chunked"),
            ("cookie", "c"),
            ("x-request-id", "theirs"),
        ],
        "ours",
    )
    assert headers == {
        "authorization": "Bearer k",
        "content-type": "application/json",
        "x-request-id": "ours",
    }
