"""What a user of the API server wrote, read from its audit log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

READING = frozenset({"get", "list", "watch"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """A request that is no read. Times are Unix seconds; `resource` is `plural` or `plural/part`."""

    user: str
    verb: str
    resource: str
    namespace: str
    name: str
    status: int
    received_s: float
    done_s: float
    dry_run: bool


def writes(audit_log: Path, user: str, *, skip_lines: int = 0) -> Iterator[Write]:
    """Requests of a user that are no reads, without the Lease, in the order of their end."""
    with audit_log.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if number < skip_lines or not line.endswith("\n"):
                continue
            event = json.loads(line)
            reference = event.get("objectRef") or {}
            if (
                event.get("stage") != "ResponseComplete"
                or event["user"].get("username") != user
                or event["verb"] in READING
                or reference.get("resource") in (None, "leases")
            ):
                continue
            part = reference.get("subresource")
            yield Write(
                user=user,
                verb=event["verb"],
                resource=reference["resource"] + (f"/{part}" if part else ""),
                namespace=reference.get("namespace", ""),
                name=reference.get("name", ""),
                status=event["responseStatus"]["code"],
                received_s=_unix_s(event["requestReceivedTimestamp"]),
                done_s=_unix_s(event["stageTimestamp"]),
                dry_run="dryRun=All" in event["requestURI"],
            )


def num_lines(audit_log: Path) -> int:
    """Lines so far: a mark for `skip_lines`."""
    with audit_log.open("rb") as lines:
        return sum(1 for _ in lines)


def _unix_s(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()
