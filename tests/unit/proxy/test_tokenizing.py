from __future__ import annotations

import json

import pytest

from flowprefill.engines.tokenizer import load_tokenizer
from flowprefill.openai.requests import ChatCompletionRequest, CompletionRequest
from flowprefill.proxy.estimate import Estimator
from flowprefill.proxy.tokenizing import equip, local_model, tokenize_with

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"


@pytest.fixture
def model(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = ["[UNK]", "user", "hello", "there"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    directory = tmp_path / "model"
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return directory


def test_only_files_that_are_here_are_used(model, tmp_path, monkeypatch):
    monkeypatch.setenv("FLOWPREFILL_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    assert local_model(f"file://{model}", None) == model
    for uri in (
        "file:///nowhere",
        "embedded://nothing",
        "hf://org/name@main",
        "pvc://claim/x",
        "simulated://t",
    ):
        assert local_model(uri, None) is None


def test_text_and_chats_are_counted_as_a_pod_counts_them(model):
    tokenizer = load_tokenizer(model)
    tokenize = tokenize_with(tokenizer)
    text = CompletionRequest(model="m", prompt="hello there hello")
    assert list(tokenize(text, "hello there hello")) == [2, 3, 2]
    messages = [{"role": "user", "content": "hello there"}]
    chat = ChatCompletionRequest(model="m", messages=messages)
    assert list(tokenize(chat, None)) == tokenizer.encode_chat(messages) == [1, 2, 3]


async def test_an_estimator_is_equipped_when_the_model_is_here(model):
    estimator = Estimator(block_size=2)
    await equip(estimator, f"file://{model}", None)
    request = CompletionRequest(model="m", prompt="hello there hello")
    estimate = estimator.estimate(request, "hello there hello")
    assert (estimate.num_tokens, estimate.source) == (3, "tokenizer")
    assert len(estimate.hashes) == 1


async def test_a_damaged_tokenizer_leaves_estimates(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    estimator = Estimator(block_size=2)
    await equip(estimator, f"file://{tmp_path}", None)
    request = CompletionRequest(model="m", prompt="x" * 40)
    assert estimator.estimate(request, "x" * 40).source == "bytes"
