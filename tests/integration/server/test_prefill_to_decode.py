"""A prompt through both servers: KV over a real socket, answers as OpenAI gives them.

The simulated engine checks the KV it builds on and its tokens are a function of the whole prompt, so an answer is
right only if every block arrived in its place.
"""

from __future__ import annotations

from pathlib import Path

from support.pods import (
    MODEL,
    WordTokenizer,
    decode_leg,
    expected_text,
    prefilled,
    running_pair,
    simulated_engine,
    stream_events,
)

PROMPT = "The quick brown fox jumps over the lazy dog, and then it does it again."


async def test_a_whole_answer_is_the_models_and_its_kv_was_received(tmp_path: Path) -> None:
    model = simulated_engine()
    async with running_pair(tmp_path, prefill=model) as (p, d):
        params = await prefilled(p, PROMPT)
        answer = await d.api.post("/v1/completions", json=decode_leg(PROMPT, params))
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["object"] == "text_completion"
        assert body["model"] == MODEL
        assert body["choices"][0]["text"] == expected_text(model, PROMPT, 12)
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"] == {
            "prompt_tokens": len(PROMPT),
            "completion_tokens": 12,
            "total_tokens": len(PROMPT) + 12,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        num_blocks = -(-len(PROMPT) // 16)
        assert await d.metric("flowprefill_kv_transfer_received_tokens_total") == len(PROMPT)
        assert (
            await d.metric("flowprefill_kv_transfer_received_bytes_total")
            == num_blocks * model.spec.kv_block_bytes
        )
        await p.until_metric("flowprefill_kv_transfer_holds_total", 1, end="pulled")
        await p.until_metric("flowprefill_kv_blocks_free", model.spec.num_kv_blocks)


async def test_a_stream_holds_the_same_text_and_ends_with_usage(tmp_path: Path) -> None:
    model = simulated_engine()
    async with running_pair(tmp_path, prefill=model) as (p, d):
        params = await prefilled(p, PROMPT)
        leg = decode_leg(PROMPT, params, stream=True, stream_options={"include_usage": True})
        answer = await d.api.post("/v1/completions", json=leg)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-accel-buffering"] == "no"
        events = stream_events(answer.text)
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == expected_text(model, PROMPT, 12)
        assert [e["choices"][0]["finish_reason"] for e in events[:-1]][-1] == "length"
        assert all(e["usage"] is None for e in events[:-1])
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["completion_tokens"] == 12


async def test_a_chat_renders_the_same_prompt_on_both_sides(tmp_path: Path) -> None:
    model = simulated_engine()
    messages = [{"role": "user", "content": [{"type": "text", "text": "Tell me about foxes, please."}]}]
    rendered = "user: Tell me about foxes, please.\n"
    async with running_pair(tmp_path, prefill=model) as (p, d):
        chat = {"model": MODEL, "messages": messages}
        leg = chat | {"max_tokens": 1, "temperature": 0, "kv_transfer_params": {"do_remote_decode": True}}
        prefill = (await p.api.post("/v1/chat/completions", json=leg)).json()
        asked = chat | {
            "max_completion_tokens": 5,
            "temperature": 0,
            "kv_transfer_params": prefill["kv_transfer_params"],
            "stream": True,
        }
        events = stream_events((await d.api.post("/v1/chat/completions", json=asked)).text)
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
        assert text == expected_text(model, rendered, 5)


async def test_n_choices_share_one_pull_and_are_equal_when_greedy(tmp_path: Path) -> None:
    model = simulated_engine()
    async with running_pair(tmp_path, prefill=model) as (p, d):
        params = await prefilled(p, PROMPT)
        body = (await d.api.post("/v1/completions", json=decode_leg(PROMPT, params, n=3))).json()
        expected = expected_text(model, PROMPT, 12)
        assert [c["text"] for c in body["choices"]] == [expected] * 3
        assert [c["index"] for c in body["choices"]] == [0, 1, 2]
        assert body["usage"]["completion_tokens"] == 36
        # The first choice pulls the whole prompt, the others only the block that each writes for itself.
        tail = len(PROMPT) % 16
        assert await d.metric("flowprefill_kv_transfer_received_tokens_total") == len(PROMPT) + 2 * tail
        await p.until_metric("flowprefill_kv_transfer_holds_total", 1, end="pulled")


async def test_seeds_make_sampled_answers_repeat_and_choices_differ(tmp_path: Path) -> None:
    model = simulated_engine()
    async with running_pair(tmp_path, prefill=model) as (p, d):
        texts = []
        for _ in range(2):
            params = await prefilled(p, PROMPT)
            leg = decode_leg(PROMPT, params, n=2, temperature=1.0, seed=11)
            body = (await d.api.post("/v1/completions", json=leg)).json()
            texts.append([c["text"] for c in body["choices"]])
        assert texts[0] == texts[1]
        assert texts[0][0] != texts[0][1]


async def test_a_stop_string_across_tokens_cuts_the_answer(tmp_path: Path) -> None:
    model = simulated_engine()
    whole = expected_text(model, PROMPT, 12)
    # Tokens are `<123>` or one character, so a stop that begins inside one token and ends inside the next one
    # lies across chunk borders.
    at = whole.index("><") if "><" in whole else 3
    stop = whole[at - 1 : at + 3]
    async with running_pair(tmp_path, prefill=model) as (p, d):
        params = await prefilled(p, PROMPT)
        leg = decode_leg(PROMPT, params, stop=[stop], stream=True)
        events = stream_events((await d.api.post("/v1/completions", json=leg)).text)
        text = "".join(e["choices"][0]["text"] for e in events)
        assert text == whole[: whole.index(stop)]
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        await d.until_metric("flowprefill_kv_blocks_free", model.spec.num_kv_blocks)


async def test_a_second_turn_pulls_only_what_the_decode_pod_lacks(tmp_path: Path) -> None:
    model = simulated_engine()
    async with running_pair(tmp_path, prefill=model) as (p, d):
        params = await prefilled(p, PROMPT)
        await d.api.post("/v1/completions", json=decode_leg(PROMPT, params))
        before = await d.metric("flowprefill_kv_transfer_received_tokens_total")
        longer = PROMPT + " And a second turn follows here."
        params = await prefilled(p, longer)
        body = (await d.api.post("/v1/completions", json=decode_leg(longer, params))).json()
        assert body["choices"][0]["text"] == expected_text(model, longer, 12)
        shared = (len(PROMPT) - 1) // 16 * 16
        assert (
            await d.metric("flowprefill_kv_transfer_received_tokens_total") - before == len(longer) - shared
        )
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) // 16 * 16


async def test_min_tokens_on_the_decode_leg_holds_back_the_end_of_text(tmp_path: Path) -> None:
    # The greedy answer to this prompt is forced to end at its first token by making that token an EOS.
    first = simulated_engine().next_token_id(WordTokenizer().encode(PROMPT))
    engines = []
    for _ in range(2):
        engine = simulated_engine()
        engine._spec = engine.spec.__class__(
            **{f: getattr(engine.spec, f) for f in engine.spec.__slots__} | {"eos_token_ids": (first,)}
        )
        engines.append(engine)
    async with running_pair(tmp_path, prefill=engines[0], decode=engines[1]) as (p, d):
        params = await prefilled(p, PROMPT)
        ends = (await d.api.post("/v1/completions", json=decode_leg(PROMPT, params))).json()
        assert ends["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
        assert ends["usage"]["completion_tokens"] == 1
        params = await prefilled(p, PROMPT)
        held = (await d.api.post("/v1/completions", json=decode_leg(PROMPT, params, min_tokens=4))).json()
        assert held["usage"]["completion_tokens"] >= 4


async def test_the_first_token_comes_with_the_kv_and_saves_a_step(tmp_path: Path) -> None:
    model = simulated_engine()
    async with running_pair(tmp_path, prefill=model) as (p, d):
        texts, steps = [], []
        for known in (True, False):
            before = await d.metric("flowprefill_decode_steps_total")
            params = await prefilled(p, PROMPT)
            assert params["first_token_id"] == model.next_token_id(WordTokenizer().encode(PROMPT))
            if not known:
                params["first_token_id"] = None  # as from a prefill pod that does not say
            body = (await d.api.post("/v1/completions", json=decode_leg(PROMPT, params))).json()
            texts.append(body["choices"][0]["text"])
            assert body["usage"]["completion_tokens"] == 12
            steps.append(await d.metric("flowprefill_decode_steps_total") - before)
        assert texts == [expected_text(model, PROMPT, 12)] * 2
        assert steps == [11, 12]


async def test_a_seed_gives_one_answer_whoever_draws_the_first_token(tmp_path: Path) -> None:
    sampled = {"temperature": 1.0, "seed": 11}
    async with running_pair(tmp_path) as (p, d):
        texts = []
        for known in (True, False):
            params = await prefilled(p, PROMPT, **sampled)
            if not known:
                params["first_token_id"] = None
            leg = decode_leg(PROMPT, params, **sampled)
            texts.append((await d.api.post("/v1/completions", json=leg)).json()["choices"][0]["text"])
        assert texts[0] == texts[1]


async def test_a_first_token_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    async with running_pair(tmp_path) as (p, d):
        params = await prefilled(p, PROMPT) | {"first_token_id": 10**9}
        answer = await d.api.post("/v1/completions", json=decode_leg(PROMPT, params))
        assert answer.status_code == 502
        assert "first_token_id is 1000000000" in answer.json()["error"]["message"]
        await p.until_metric("flowprefill_kv_transfer_holds_total", 1, end="aborted")


async def test_a_leg_that_forbids_an_early_end_leaves_the_first_token_to_decode(tmp_path: Path) -> None:
    async with running_pair(tmp_path) as (p, _):
        assert (await prefilled(p, PROMPT, min_tokens=1))["first_token_id"] is None
