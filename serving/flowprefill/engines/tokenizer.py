"""Text to token ids and back, without torch: `tokenizers` and the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowprefill.errors import InvalidRequest, ModelNotLoadable

if TYPE_CHECKING:
    import jinja2
    import tokenizers

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer. Thread-safe."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, *, settings: Mapping[str, Any], template: str | None
    ) -> None:
        """`settings` is tokenizer_config.json, `template` the chat template's Jinja source."""
        self._tokenizer = tokenizer
        self._template_source = template
        self._special = {
            name: token["content"] if isinstance(token, dict) else token
            for name in SPECIAL_TOKENS
            if (token := settings.get(name)) is not None
        }

    @property
    def vocab_size(self) -> int:
        """Token ids are below this number."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._template_source is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # Of the library's calls only those for batches leave the interpreter to other threads meanwhile.
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of the messages in the model's chat template, ready for the assistant's answer.

        Raises InvalidRequest when the model has no template or its template refuses the messages.
        """
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The messages as text, as transformers' `apply_chat_template(..., add_generation_prompt=True)` writes it."""
        if self._template_source is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        import jinja2

        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special,
            )
        except (jinja2.TemplateError, TypeError) as error:
            # Templates refuse what their model was not trained on by raising, with words meant for the user.
            raise InvalidRequest(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of these tokens, special tokens left out."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def token_id(self, token: str) -> int | None:
        """The id of a token's exact text."""
        return self._tokenizer.token_to_id(token)

    @cached_property
    def _template(self) -> jinja2.Template:
        assert self._template_source is not None
        return _environment().from_string(self._template_source)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of the model in directory `path`. Raises ModelNotLoadable."""
    import tokenizers

    path = Path(path)
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelNotLoadable(f"{path} has no tokenizer.json; accepted are models with a fast tokenizer")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelNotLoadable(f"{file} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _read_json(path / "tokenizer_config.json")
    return Tokenizer(tokenizer, settings=settings, template=_chat_template(path, settings))


def _chat_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    """The template's own file wins; in tokenizer_config.json it is one text, or several of which `default` counts."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelNotLoadable(f"{path} is not JSON: {error}") from error
    return value


def _environment() -> jinja2.Environment:
    """Jinja as chat templates expect it. Templates come with models, so they run sandboxed."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    # Local time, as in transformers: the date in a prompt is the date where the server is.
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment
