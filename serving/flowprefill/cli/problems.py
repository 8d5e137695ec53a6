"""Errors as a person reads them: one clear message, no traceback."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import NoReturn

import typer

from flowprefill.errors import FlowPrefillError

FAILED = 1
BAD_INPUT = 2


def fail(message: str, *, code: int = FAILED) -> NoReturn:
    """Print the message to standard error and end the command."""
    print(f"flowprefill: {message}", file=sys.stderr)
    raise typer.Exit(code)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Turn errors that are raised on purpose into a message and an exit code.

    2 for a document or option that is not acceptable, 1 for everything that did not work out. Any other exception is
    a fault of this program and keeps its traceback.
    """
    from flowprefill_crd import InvalidDocument

    try:
        yield
    except InvalidDocument as error:
        fail(str(error), code=BAD_INPUT)
    except FlowPrefillError as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _OURS:
            raise
        fail(f'{error.name} is not installed; this command needs more: pip install "flowprefill[serving]"')


_OURS = frozenset({"flowprefill", "flowprefill_crd", "flowprefill_operator"})
