"""The embedded model for tests: its directory, or a loud skip where it cannot be had."""

from __future__ import annotations

import functools
from pathlib import Path

from flowprefill.engines.models import resolve_model
from flowprefill.errors import ModelNotLoadable
from support.capabilities import require

URI = "embedded://smollm2-135m-instruct"


@functools.cache
def _resolved() -> Path | str:
    try:
        return resolve_model(URI).path
    except ModelNotLoadable as error:
        return str(error)


def embedded_model() -> Path:
    """The model's directory; fetched on first use."""
    found = _resolved()
    require("model", isinstance(found, Path), str(found))
    assert isinstance(found, Path)
    return found
