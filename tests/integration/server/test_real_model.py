"""The embedded model through a prefill and a decode pod: the text of one plain transformers `generate`.

Float32 on one thread, so that greedy choices do not hang on the order of a sum.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from flowprefill.engines.registry import load_engine, load_tokenizer
from flowprefill.errors import ModelNotLoadable
from support.capabilities import require
from support.pods import MODEL, RunningPod, pod_config, running_pod, stream_events

pytestmark = [pytest.mark.model, pytest.mark.torch, pytest.mark.asyncio(loop_scope="module")]

PROMPT = (
    "The lighthouse stood at the end of the pier, and every evening its keeper climbed the stairs to light "
    "the lamp. One night, when the fog was so thick that"
)
MESSAGES = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]
CONFIG = pod_config(
    model={"uri": "embedded://smollm2-135m-instruct", "servedName": MODEL, "maxModelLen": 1024},
    engine={"type": "torch", "dtype": "float32", "kvCacheTokens": 2048},
    predictor={"warmup": False},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """transformers alone."""

    model: Any
    tokenizer: Any

    def text(self, prompt_ids: list[int], num_tokens: int) -> str:
        import torch

        generated = self.model.generate(
            torch.tensor([prompt_ids]), max_new_tokens=num_tokens, do_sample=False, pad_token_id=2
        )
        text: str = self.tokenizer.decode(generated[0, len(prompt_ids) :], skip_special_tokens=True)
        return text


@pytest.fixture(scope="module")
def path() -> Path:
    pytest.importorskip("torch")
    from flowprefill.engines.models import resolve_model

    try:
        return resolve_model(CONFIG.model.uri).path
    except ModelNotLoadable as error:
        require("model", False, str(error))
        raise


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return Reference(model=model, tokenizer=AutoTokenizer.from_pretrained(path))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(
    path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[RunningPod, RunningPod]]:
    tmp_path = tmp_path_factory.mktemp("pods")
    engines = [load_engine(CONFIG) for _ in range(2)]
    tokenizer = load_tokenizer(CONFIG, engines[0])
    async with (
        running_pod("prefill", tmp_path, engine=engines[0], config=CONFIG, tokenizer=tokenizer) as p,
        running_pod("decode", tmp_path, engine=engines[1], config=CONFIG, tokenizer=tokenizer) as d,
    ):
        yield p, d


async def both_legs(
    pair: tuple[RunningPod, RunningPod], path: str, body: dict[str, Any]
) -> tuple[dict[str, Any], Any]:
    """The prefill leg's answer and the decode leg's response."""
    p, d = pair
    leg = {
        k: v for k, v in body.items() if k not in ("stream", "stream_options", "n", "max_completion_tokens")
    }
    leg |= {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    prefill = await p.api.post(path, json=leg)
    assert prefill.status_code == 200, prefill.text
    decode = await d.api.post(path, json=body | {"kv_transfer_params": prefill.json()["kv_transfer_params"]})
    assert decode.status_code == 200, decode.text
    return prefill.json(), decode


async def test_a_greedy_completion_is_transformers_own(
    pair: tuple[RunningPod, RunningPod], reference: Reference
) -> None:
    prompt_ids = reference.tokenizer(PROMPT)["input_ids"]
    expected = reference.text(prompt_ids, 24)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    before = await pair[1].metric("flowprefill_kv_transfer_received_tokens_total")
    prefill, whole = await both_legs(pair, "/v1/completions", body)
    assert whole.json()["choices"][0]["text"] == expected
    assert whole.json()["usage"]["prompt_tokens"] == len(prompt_ids)
    assert expected.startswith(prefill["choices"][0]["text"])
    received = await pair[1].metric("flowprefill_kv_transfer_received_tokens_total") - before
    assert received == len(prompt_ids)
    stream = body | {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
    _, streamed = await both_legs(pair, "/v1/completions", stream)
    events = stream_events(streamed.text)
    texts = {0: "", 1: ""}
    for event in events[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {0: expected, 1: expected}
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt_ids) // 16 * 16


async def test_a_chat_is_rendered_as_transformers_does_on_both_sides(
    pair: tuple[RunningPod, RunningPod], reference: Reference
) -> None:
    rendered = reference.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    prompt_ids = reference.tokenizer(rendered, add_special_tokens=False)["input_ids"]
    body = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 20, "temperature": 0}
    _, answer = await both_legs(pair, "/v1/chat/completions", body)
    choice = answer.json()["choices"][0]
    assert choice["message"]["content"] == reference.text(prompt_ids, 20)
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert answer.json()["usage"]["prompt_tokens"] == len(prompt_ids)


async def test_a_prompt_preempted_while_it_is_computed_gives_the_same_text(
    pair: tuple[RunningPod, RunningPod], reference: Reference
) -> None:
    p, _ = pair
    soon = {"ttft_slo": 300.0, "ttft_target": 300.0}

    async def preemptions() -> float:
        return await p.metric("flowprefill_prefill_preemptions_total")

    for attempt in range(6):  # on a busy machine a long prompt may end before a short one gets to it
        long = " ".join([f"Take {attempt}.", *[PROMPT] * 12])
        prompt_ids = reference.tokenizer(long)["input_ids"]
        body = {"model": MODEL, "prompt": long, "max_tokens": 8, "temperature": 0}
        late = body | {"vllm_xargs": {"ttft_slo": 600.0, "ttft_target": 600.0}}
        before = await preemptions()
        both = asyncio.ensure_future(both_legs(pair, "/v1/completions", late))
        while await preemptions() == before and not both.done():
            short = {"model": MODEL, "prompt": f"Number {time.monotonic_ns()} is", "max_tokens": 1}
            leg = short | {"kv_transfer_params": {"do_remote_decode": True}, "vllm_xargs": soon}
            assert (await p.api.post("/v1/completions", json=leg)).status_code == 200
        _, answer = await both
        assert answer.json()["choices"][0]["text"] == reference.text(prompt_ids, 8)
        if await preemptions() > before:
            break
    else:
        raise AssertionError("no short prompt ever came while a long one ran")
    history = (await p.admin.get("/v1/history")).json()
    assert any(task["preemptions"] for task in history["tasks"]), json.dumps(history)[:500]


async def test_a_colocated_pod_gives_the_same_text_while_prefills_and_answers_share_the_engine(
    path: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> None:
    engine = load_engine(CONFIG)
    config = CONFIG.model_copy(update={"mode": "Colocated"})
    tokenizer = load_tokenizer(config, engine)
    tmp_path = tmp_path_factory.mktemp("colocated")
    prompts = [PROMPT, " ".join([PROMPT] * 6), "One, two, three, four,"]
    async with running_pod("colocated", tmp_path, engine=engine, config=config, tokenizer=tokenizer) as pod:
        bodies = [{"model": MODEL, "prompt": p, "max_tokens": 12, "temperature": 0} for p in prompts]
        answers = await asyncio.gather(*(pod.api.post("/v1/completions", json=body) for body in bodies))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.status_code == 200, answer.text
            prompt_ids = reference.tokenizer(prompt)["input_ids"]
            assert answer.json()["choices"][0]["text"] == reference.text(prompt_ids, 12)
        await pod.until_metric("flowprefill_kv_blocks_free", engine.spec.num_kv_blocks)
