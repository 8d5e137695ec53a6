"""Log output of every process: text for people, or one JSON object a line.

Loggers pass a constant message and `extra` fields; both formats print the fields. Fields whose name says that
they hold a secret are replaced, whatever a caller passes.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal, TextIO

LogFormat = Literal["json", "text"]

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_SECRET = frozenset({"authorization", "api_key", "api_keys", "key", "password", "secret", "hf_token"})
_REDACTED = "[redacted]"


def configure_logging(
    log_format: LogFormat = "text", level: str = "info", *, stream: TextIO | None = None
) -> None:
    """Send all logs of this process to `stream` (stderr) in this format. Call once, at the start of a command."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    set_level(level)
    for noisy in ("asyncio", "httpcore", "httpx", "uvicorn", "filelock", "urllib3", "watchfiles"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def set_level(level: str) -> None:
    """Change the level of this process's own logs: `debug`, `info`, `warning` or `error`."""
    logging.getLogger().setLevel(level.upper())


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, logger, message, then the extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        body: dict[str, object] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        body |= _fields(record)
        if record.exc_info:
            body["error"] = self.formatException(record.exc_info)
        return json.dumps(body, default=str, ensure_ascii=False, separators=(",", ":"))


class TextFormatter(logging.Formatter):
    """`TIME LEVEL logger: message key=value ...`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        # A line feed in a value must not look like a new log line.
        fields = fields.replace("\r", "\\r").replace("\n", "\\n")
        line = f"{_utc(record.created)} {record.levelname:<7} {record.name}: {record.getMessage()}{fields}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {
        name: _REDACTED if name.lower() in _SECRET else value
        for name, value in vars(record).items()
        if name not in _STANDARD and not name.startswith("_")
    }


def _utc(created_s: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created_s))
    return f"{whole}.{int(created_s % 1 * 1000):03d}Z"
