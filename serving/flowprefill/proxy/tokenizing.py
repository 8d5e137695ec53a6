"""The model's tokenizer in the proxy, when its files happen to be on this machine. Nothing is ever fetched for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from flowprefill.engines import embedded
from flowprefill.engines.models import CLAIMS, cache_directory
from flowprefill.engines.tokenizer import Tokenizer, load_tokenizer
from flowprefill.errors import ModelNotLoadable
from flowprefill.openai.requests import ChatCompletionRequest, CompletionRequest, GenerationRequest, Prompt
from flowprefill.proxy.estimate import Estimator, Tokenize

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 10.0
"""Pods may still be fetching the model when the proxy starts."""

FILE = "tokenizer.json"


def local_model(uri: str, revision: str | None) -> Path | None:
    """The directory of this model's tokenizer on this machine; None when it is not (yet) here."""
    scheme, _, rest = uri.partition("://")
    candidates: list[Path] = []
    match scheme:
        case "embedded":
            places = (embedded.BAKED / rest, cache_directory() / "models" / rest)
            candidates = [place for place in places if (place / embedded.MANIFEST).is_file()]
        case "file":
            candidates = [Path(rest)]
        case "pvc":
            candidates = [CLAIMS / rest]
        case "hf":
            repository, _, named = rest.partition("@")
            candidates = _in_hub_cache(repository, named or revision or "main")
    return next((place for place in candidates if (place / FILE).is_file()), None)


def tokenize_with(tokenizer: Tokenizer) -> Tokenize:
    """Token ids of prompts as pods see them."""

    def tokenize(request: GenerationRequest, prompt: Prompt | None) -> Sequence[int]:
        if isinstance(request, ChatCompletionRequest):
            return tokenizer.encode_chat(request.template_messages())
        assert isinstance(request, CompletionRequest)
        assert isinstance(prompt, str), "token ids need no tokenizer"
        return tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens)

    return tokenize


async def equip(estimator: Estimator, uri: str, revision: str | None) -> None:
    """Give the estimator the model's tokenizer as soon as its files are here."""
    while True:
        path = await asyncio.to_thread(local_model, uri, revision)
        if path is not None:
            try:
                tokenizer = await asyncio.to_thread(load_tokenizer, path)
            except ModelNotLoadable as error:
                log.warning("no tokenizer; prompt lengths are estimated", extra={"reason": str(error)})
                return
            estimator.use(tokenize_with(tokenizer))
            log.info("prompts are tokenized for placement", extra={"path": str(path)})
            return
        await asyncio.sleep(LOOK_AGAIN_S)


def _in_hub_cache(repository: str, revision: str) -> list[Path]:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:  # the proxy's image may do without it
        return []
    found = try_to_load_from_cache(repository, FILE, revision=revision)
    return [Path(found).parent] if isinstance(found, str) else []
