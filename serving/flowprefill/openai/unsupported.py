"""Fields of OpenAI's and vLLM's APIs that would change the answer and are not supported: refused by name.

A value that asks for nothing (null, the API's default) is let through, since clients send defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flowprefill.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """`accepted` are the values that ask for nothing; `reason` completes "FIELD is not supported: "."""

    accepted: tuple[object, ...] = ()
    reason: str


_TOOLS = "this server does not call tools"
_STRUCTURED = "output is plain text"
_LOGPROBS = "log probabilities are not carried between prefill and decode"
_SAMPLING = "sampling offers temperature, top_p, seed and min_tokens"
_TEMPLATE = "prompts are rendered with the model's own chat template"

UNSUPPORTED: Mapping[str, _Refusal] = {
    "tools": _Refusal(accepted=([],), reason=_TOOLS),
    "tool_choice": _Refusal(accepted=("none",), reason=_TOOLS),
    "functions": _Refusal(accepted=([],), reason=_TOOLS),
    "function_call": _Refusal(accepted=("none",), reason=_TOOLS),
    "web_search_options": _Refusal(reason=_TOOLS),
    "response_format": _Refusal(accepted=({"type": "text"},), reason=_STRUCTURED),
    "structured_outputs": _Refusal(accepted=({},), reason=_STRUCTURED),
    "guided_json": _Refusal(reason=_STRUCTURED),
    "guided_regex": _Refusal(reason=_STRUCTURED),
    "guided_choice": _Refusal(reason=_STRUCTURED),
    "guided_grammar": _Refusal(reason=_STRUCTURED),
    "modalities": _Refusal(accepted=(["text"],), reason=_STRUCTURED),
    "audio": _Refusal(reason=_STRUCTURED),
    "prediction": _Refusal(reason="predicted outputs are not used"),
    "reasoning_effort": _Refusal(accepted=("none",), reason="no reasoning is separated from the answer"),
    "reasoning": _Refusal(reason="no reasoning is separated from the answer"),
    "verbosity": _Refusal(accepted=("medium",), reason="the model has no such setting"),
    "echo": _Refusal(
        accepted=(False,), reason="the prompt's text is not repeated between prefill and decode"
    ),
    "logprobs": _Refusal(accepted=(False,), reason=_LOGPROBS),
    "top_logprobs": _Refusal(accepted=(0,), reason=_LOGPROBS),
    "prompt_logprobs": _Refusal(reason=_LOGPROBS),
    "return_token_ids": _Refusal(accepted=(False,), reason="answers hold text"),
    "return_tokens_as_token_ids": _Refusal(accepted=(False,), reason="answers hold text"),
    "suffix": _Refusal(accepted=("",), reason="text is generated at the prompt's end only"),
    "logit_bias": _Refusal(accepted=({},), reason=_SAMPLING),
    "presence_penalty": _Refusal(accepted=(0,), reason=_SAMPLING),
    "frequency_penalty": _Refusal(accepted=(0,), reason=_SAMPLING),
    "repetition_penalty": _Refusal(accepted=(1,), reason=_SAMPLING),
    "length_penalty": _Refusal(accepted=(1,), reason=_SAMPLING),
    "top_k": _Refusal(accepted=(-1, 0), reason=_SAMPLING),
    "min_p": _Refusal(accepted=(0,), reason=_SAMPLING),
    "use_beam_search": _Refusal(accepted=(False,), reason=_SAMPLING),
    "logits_processors": _Refusal(accepted=([],), reason=_SAMPLING),
    "bad_words": _Refusal(accepted=([],), reason=_SAMPLING),
    "allowed_token_ids": _Refusal(reason=_SAMPLING),
    "truncate_prompt_tokens": _Refusal(reason="a prompt is used whole or refused"),
    "include_stop_str_in_output": _Refusal(accepted=(False,), reason="stop strings are cut off"),
    "skip_special_tokens": _Refusal(accepted=(True,), reason="special tokens are not part of the answer"),
    "spaces_between_special_tokens": _Refusal(
        accepted=(True,), reason="special tokens are not in the answer"
    ),
    "chat_template": _Refusal(reason=_TEMPLATE),
    "chat_template_kwargs": _Refusal(accepted=({},), reason=_TEMPLATE),
    "documents": _Refusal(accepted=([],), reason=_TEMPLATE),
    "add_generation_prompt": _Refusal(accepted=(True,), reason=_TEMPLATE),
    "continue_final_message": _Refusal(accepted=(False,), reason=_TEMPLATE),
    "prompt_embeds": _Refusal(reason="prompts are text or token ids"),
    "store": _Refusal(accepted=(False,), reason="nothing is stored"),
}


def refuse_unsupported(body: Mapping[str, object]) -> None:
    """Raise `InvalidRequest` naming the first field of `body` that asks for something unsupported."""
    for name, value in body.items():
        refusal = UNSUPPORTED.get(name)
        if refusal is None or value is None or _is_accepted(value, refusal.accepted):
            continue
        raise InvalidRequest(
            f"{name} is not supported: {refusal.reason}; got {_short(value)}, {_accepted_text(refusal)}",
            param=name,
            code="unsupported_parameter",
        )
    _refuse_best_of(body)


def _refuse_best_of(body: Mapping[str, object]) -> None:
    """`best_of` equal to `n` asks for nothing."""
    best_of = body.get("best_of")
    n = body.get("n")
    if best_of is not None and best_of != (1 if n is None else n):
        raise InvalidRequest(
            f"best_of is not supported: {_SAMPLING}; got {_short(best_of)}, accepted is the value of n",
            param="best_of",
            code="unsupported_parameter",
        )


def _is_accepted(value: object, accepted: tuple[object, ...]) -> bool:
    """Equality that tells booleans from numbers (`logprobs: 0` asks for something, `false` does not)."""
    return any(value == good and isinstance(value, bool) == isinstance(good, bool) for good in accepted)


def _accepted_text(refusal: _Refusal) -> str:
    if not refusal.accepted:
        return "leave it out"
    return f"accepted is {' or '.join(_short(value) for value in refusal.accepted)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
