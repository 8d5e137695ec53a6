"""Prefill pods whose answers name no KV: vLLM's connectors that find it by the prompt, and prompts that end with their first token."""

from __future__ import annotations

from starlette.responses import JSONResponse

from support.proxy_under_test import proxy_with_pods


def null_answer() -> JSONResponse:
    choice = {"index": 0, "text": "", "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    return JSONResponse(
        {
            "id": "p",
            "object": "text_completion",
            "choices": [choice],
            "usage": usage,
            "kv_transfer_params": None,
        }
    )


async def test_a_null_goes_on_to_decode_once_and_gives_nothing_back(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        (prefill,), (decode,) = pair.prefill, pair.decode
        prefill.fail[1] = null_answer
        decode._words = lambda body: ["found", "by", "prompt"]  # as a pod does that needs no address
        client_says = {"kv_transfer_params": {"remote_host": "evil"}}
        answer = await pair.running.complete("a b c", **client_says)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == "found by prompt "
        assert len(prefill.seen) == len(decode.seen) == 1
        assert "kv_transfer_params" not in decode.seen[0].body
        await pair.running.at_rest()
        assert prefill.released == []
