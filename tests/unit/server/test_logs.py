"""Logs: fields in both formats, no secrets, one line an event."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from flowprefill.logs import configure_logging


@pytest.fixture(autouse=True)
def _restore_root() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


def test_json_has_one_object_a_line_with_the_extra_fields() -> None:
    out = io.StringIO()
    configure_logging("json", "info", stream=out)
    logging.getLogger("a.b").info("prefill done", extra={"request_id": "r1", "num_tokens": 3})
    logging.getLogger("a.b").debug("not shown")
    (line,) = out.getvalue().splitlines()
    entry = json.loads(line)
    assert entry["message"] == "prefill done"
    assert entry["level"] == "info"
    assert entry["logger"] == "a.b"
    assert (entry["request_id"], entry["num_tokens"]) == ("r1", 3)
    assert entry["time"].endswith("Z")


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_secrets_are_never_written(log_format: str) -> None:
    out = io.StringIO()
    configure_logging(log_format, "info", stream=out)  # type: ignore[arg-type]
    fields = {"authorization": "Bearer hunter2", "api_key": "hunter2", "Password": "hunter2"}
    logging.getLogger("x").info("request", extra=fields)
    assert "hunter2" not in out.getvalue()
    assert "[redacted]" in out.getvalue()


def test_a_value_cannot_forge_a_line_of_text() -> None:
    out = io.StringIO()
    configure_logging("text", "info", stream=out)
    logging.getLogger("x").info("request", extra={"path": "/a\n2026 ERROR forged"})
    assert len(out.getvalue().splitlines()) == 1


def test_an_exception_comes_with_its_traceback() -> None:
    out = io.StringIO()
    configure_logging("json", "info", stream=out)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("x").exception("failed")
    assert "ValueError: broken" in json.loads(out.getvalue())["error"]
