"""Errors as a person reads them: one clear message, no traceback."""

from __future__ import annotations

import contextlib
import errno
import os
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

    2 for a document or option that is not acceptable, 1 for everything that did not work out, also what the operating
    system refuses. Any other exception is a fault of this program and keeps its traceback.
    """
    from flowprefill_crd import InvalidDocument

    try:
        try:
            yield
        finally:
            print(end="", flush=True)  # what standard output does not take is known here, not at the very end
    except InvalidDocument as error:
        fail(str(error), code=BAD_INPUT)
    except FlowPrefillError as error:
        fail(str(error))
    except OSError as error:
        if error.errno == errno.EPIPE:  # whoever read the output has enough; typer ends the command quietly
            raise
        _drop_output()
        fail(_words(error))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _OURS:
            raise
        fail(f'{error.name} is not installed; this command needs more: pip install "flowprefill[serving]"')


def _words(error: OSError) -> str:
    """What the operating system refused: the file, when it names one, and the reason."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is None:
        return reason
    name = error.filename if isinstance(error.filename, int) else os.fsdecode(error.filename)
    return f"{name}: {reason}"


def _drop_output() -> None:
    """Let go of what standard output does not take, or the interpreter would fail on it once more at its end."""
    try:
        print(end="", flush=True)
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


_OURS = frozenset({"flowprefill", "flowprefill_crd", "flowprefill_operator"})
