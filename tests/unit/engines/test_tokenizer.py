"""Tokenizers and chat templates, compared with transformers' own where that is installed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from flowprefill.engines.tokenizer import load_tokenizer
from flowprefill.errors import InvalidRequest, ModelNotLoadable

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<s>system\nBe kind.</s>\n' }}{% endif %}\n"
    "    {{ '<s>' + message['role'] + '\n' + message['content'] + '</s>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
CONVERSATIONS: Sequence[Sequence[Mapping[str, str]]] = (
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": 'Answer "briefly" & well.'},
        {"role": "user", "content": "Wie geht's? 漢字 🙂"},
    ],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two\n\n  three"},
        {"role": "user", "content": "{{ messages }} {% raise %}"},
    ],
)


def write_model(path: Path, *, template: str | None = CHATML, in_config: Any = None) -> Path:
    """A byte-level tokenizer with three special tokens, and a chat template in either place."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", "<unk>", *alphabet])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<unk>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
    }
    if in_config is not None:
        config["chat_template"] = in_config
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def test_text_comes_back_without_special_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path))
    text = "naïve 漢字 🙂"
    token_ids = tokenizer.encode(text)
    assert token_ids[0] == 0
    assert tokenizer.encode(text, add_special_tokens=False) == token_ids[1:]
    assert tokenizer.decode([*token_ids, 1]) == text
    assert tokenizer.vocab_size == 259
    assert tokenizer.token_id("</s>") == 1
    assert tokenizer.token_id("nothing of the sort") is None


def test_special_tokens_in_a_chat_are_tokens_and_none_is_added(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path))
    token_ids = tokenizer.encode_chat(CONVERSATIONS[0])
    assert token_ids.count(0) == 3  # system, user, assistant: not one more in front
    assert token_ids.count(1) == 2


@pytest.mark.torch
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_a_chat_is_written_as_transformers_writes_it(
    tmp_path: Path, messages: Sequence[Mapping[str, str]]
) -> None:
    import transformers

    path = write_model(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    ours = load_tokenizer(path)
    options = {"add_generation_prompt": True, "tokenize": False}
    assert ours.render_chat(messages) == theirs.apply_chat_template(messages, **options)
    tokens = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(messages) == tokens


@pytest.mark.torch
@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{{ eos_token }}{{ messages | tojson }}",
        "{{ messages | tojson(indent=2) }}",
        "{% if tools is none and not documents %}plain{% endif %}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ strftime_now('%Y') }}",
        "  {% if true %}\n  trimmed\n  {% endif %}\n",
    ],
)
def test_what_templates_may_use_means_what_it_means_in_transformers(tmp_path: Path, template: str) -> None:
    import transformers

    path = write_model(tmp_path, template=template)
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    expected = theirs.apply_chat_template(CONVERSATIONS[1], add_generation_prompt=True, tokenize=False)
    assert load_tokenizer(path).render_chat(CONVERSATIONS[1]) == expected


def test_a_template_that_refuses_the_messages_is_the_clients_mistake(tmp_path: Path) -> None:
    path = write_model(tmp_path, template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        load_tokenizer(path).encode_chat(CONVERSATIONS[0])


def test_a_template_cannot_reach_python(tmp_path: Path) -> None:
    path = write_model(tmp_path, template="{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(InvalidRequest, match="refused"):
        load_tokenizer(path).encode_chat(CONVERSATIONS[0])


def test_a_model_without_a_template_names_the_other_endpoint(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path, template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        tokenizer.encode_chat(CONVERSATIONS[0])


def test_the_templates_file_wins_over_the_configuration_and_default_over_others(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    both = load_tokenizer(write_model(tmp_path / "a", template="file", in_config="configuration"))
    assert both.render_chat([]) == "file"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    listed = load_tokenizer(write_model(tmp_path / "b", template=None, in_config=named))
    assert listed.render_chat([]) == "usual"


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotLoadable, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelNotLoadable, match="cannot be read"):
        load_tokenizer(tmp_path)
    write_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelNotLoadable, match="is not JSON"):
        load_tokenizer(tmp_path)
