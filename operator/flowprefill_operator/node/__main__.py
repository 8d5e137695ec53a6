"""A supervisor in a process of its own: `python -m flowprefill_operator.node ROOT NAMESPACE NAME`."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

from flowprefill_crd import InvalidDocument
from flowprefill_operator.node.run import supervise
from flowprefill_operator.node.state import StateDir
from flowprefill_operator.node.supervisor import CannotStart

_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {
    "message",
    "asctime",
    "taskName",
}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, message and the record's extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        entry |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def log_as_json() -> None:
    """Send the node's log to standard error as JSON lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger("flowprefill_operator")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False


def main() -> int:
    root, namespace, name = sys.argv[1:]
    log_as_json()
    try:
        supervise(StateDir(Path(root), namespace=namespace, name=name).create())
    except (CannotStart, InvalidDocument) as error:
        logging.getLogger(__name__).error(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
