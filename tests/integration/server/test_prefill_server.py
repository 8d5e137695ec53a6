"""The prefill server over real sockets, on the simulated engine."""

from __future__ import annotations

from pathlib import Path

from support.pods import WordTokenizer, prefill_leg, running_pod, simulated_engine

PROMPT = "The quick brown fox jumps over the lazy dog, twice."


async def test_a_prefill_leg_answers_one_token_and_where_the_kv_waits(tmp_path: Path) -> None:
    engine = simulated_engine()
    async with running_pod("prefill", tmp_path, engine=engine) as pod:
        answer = await pod.api.post("/v1/completions", json=prefill_leg(PROMPT))
        assert answer.status_code == 200, answer.text
        body = answer.json()
        token_ids = WordTokenizer().encode(PROMPT)
        expected = engine.next_token_id(token_ids)
        assert body["choices"][0]["text"] == WordTokenizer().decode([expected])
        assert body["usage"]["prompt_tokens"] == len(token_ids)
        params = body["kv_transfer_params"]
        assert params["do_remote_prefill"] is True
        assert params["num_tokens"] == len(token_ids)
        assert len(params["remote_block_ids"]) == -(-len(token_ids) // 16)
        assert await pod.metric("flowprefill_kv_transfer_held_requests") == 1
